{{- /* What the schema cannot say, because it compares two values. */ -}}
{{- define "stemserve.checks" -}}
{{- $v := .Values -}}
{{- $needed := add $v.drain.seconds $v.drain.delaySeconds 5 | int -}}
{{- if lt ($v.terminationGracePeriodSeconds | int) $needed -}}
{{- fail (printf "terminationGracePeriodSeconds must be at least %d: drain.seconds, drain.delaySeconds and 5 to stop" $needed) -}}
{{- end -}}
{{- if and (eq $v.auth.mode "none") (not $v.auth.allowInsecure) -}}
{{- fail "auth.mode none lets everybody call whom the network lets through: choose keys, jwt or mtls, or set auth.allowInsecure" -}}
{{- end -}}
{{- if and (eq $v.auth.mode "none") $v.tenants -}}
{{- fail "tenants need auth.mode keys, jwt or mtls" -}}
{{- end -}}
{{- if and (ne $v.auth.mode "none") (not $v.tenants) -}}
{{- fail (printf "auth.mode %s needs tenants" $v.auth.mode) -}}
{{- end -}}
{{- if and (ne $v.auth.mode "none") (not $v.tls.secretName) (ne $v.auth.mode "mtls") (not $v.auth.allowInsecure) -}}
{{- fail "keys and tokens would travel in the clear: set tls.secretName, or auth.allowInsecure where the network encrypts" -}}
{{- end -}}
{{- if eq $v.auth.mode "mtls" -}}
{{- if or (not $v.tls.secretName) (not $v.tls.demandClientCertificate) -}}
{{- fail "auth.mode mtls needs tls.secretName and tls.demandClientCertificate" -}}
{{- end -}}
{{- if ne $v.router.mode "none" -}}
{{- fail "auth.mode mtls needs router.mode none: Envoy or a gateway ends TLS, so the servers would see its certificate and not the callers'" -}}
{{- end -}}
{{- end -}}
{{- if and $v.tls.demandClientCertificate (not $v.tls.secretName) -}}
{{- fail "tls.demandClientCertificate needs tls.secretName" -}}
{{- end -}}
{{- if and (eq $v.auth.mode "jwt") (not (and $v.auth.jwt.jwksSecret.name $v.auth.jwt.issuer $v.auth.jwt.audience)) -}}
{{- fail "auth.mode jwt needs auth.jwt.jwksSecret.name, issuer and audience" -}}
{{- end -}}
{{- if and (eq $v.model.source "pvc") (not $v.model.existingClaim) -}}
{{- fail "model.source pvc needs model.existingClaim" -}}
{{- end -}}
{{- if and (eq $v.model.source "hostPath") (not $v.model.hostPath) -}}
{{- fail "model.source hostPath needs model.hostPath" -}}
{{- end -}}
{{- if and (eq $v.model.source "image") (not $v.model.image) -}}
{{- fail "model.source image needs model.image" -}}
{{- end -}}
{{- if and (eq $v.model.source "download") (not $v.model.download.files) -}}
{{- fail "model.source download needs model.download.files" -}}
{{- end -}}
{{- if and (eq $v.router.mode "gateway") (not $v.gateway.name) -}}
{{- fail "router.mode gateway needs gateway.name" -}}
{{- end -}}
{{- if and $v.tls.secretName (has $v.router.mode (list "gateway" "inferencePool")) -}}
{{- fail (printf "router.mode %s needs servers without tls.secretName: the gateway ends TLS and speaks plain HTTP/2 to them" $v.router.mode) -}}
{{- end -}}
{{- if eq $v.router.mode "inferencePool" -}}
{{- if not $v.inferencePool.endpointPicker.service -}}
{{- fail "router.mode inferencePool needs inferencePool.endpointPicker.service" -}}
{{- end -}}
{{- end -}}
{{- if and $v.router.autoscaling.enabled (gt ($v.router.replicas | int) ($v.router.autoscaling.max | int)) -}}
{{- fail "router.replicas is more than router.autoscaling.max" -}}
{{- end -}}
{{- if gt ($v.autoscaling.min | int) ($v.autoscaling.max | int) -}}
{{- fail "autoscaling.min is more than autoscaling.max" -}}
{{- end -}}
{{- if and (eq $v.autoscaling.kind "keda") (not $v.autoscaling.prometheusAddress) -}}
{{- fail "autoscaling.kind keda needs autoscaling.prometheusAddress" -}}
{{- end -}}
{{- if and $v.certificates.issuer.name (not $v.tls.secretName) (not $v.leaderWorkerSet.tls.workerSecretName) -}}
{{- fail "certificates.issuer makes what tls.secretName and leaderWorkerSet.tls name: name a Secret there" -}}
{{- end -}}
{{- if include "stemserve.hasGroups" . }}{{ include "stemserve.groupChecks" . }}{{ end -}}
{{- end -}}

{{- define "stemserve.groupChecks" -}}
{{- $v := .Values -}}
{{- $tls := $v.leaderWorkerSet.tls -}}
{{- if ne (empty $tls.leaderSecretName) (empty $tls.workerSecretName) -}}
{{- fail "leaderWorkerSet.tls.leaderSecretName and workerSecretName go together" -}}
{{- end -}}
{{- if and (not $tls.workerSecretName) (not $tls.allowPlaintext) -}}
{{- fail "a worker does as it is told by whoever connects: set leaderWorkerSet.tls.leaderSecretName and workerSecretName, or allowPlaintext where only the leaders reach it" -}}
{{- end -}}
{{- if and (eq $v.router.mode "envoy") (ne (toString $v.updateStrategy.maxSurge) "0") -}}
{{- fail "workload LeaderWorkerSet with router.mode envoy needs updateStrategy.maxSurge 0: Envoy knows the replicas by their names" -}}
{{- end -}}
{{- /* The label of a StatefulSet's pods, NAME-group-999- and a hash of 10, has 63 characters at most. */ -}}
{{- if gt (len (include "stemserve.fullname" .)) 42 -}}
{{- fail (printf "the name %s is too long for workload LeaderWorkerSet: 42 characters at most; set fullnameOverride" (include "stemserve.fullname" .)) -}}
{{- end -}}
{{- end -}}
