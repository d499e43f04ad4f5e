{{- /* The pod of one server, for a Deployment, a StatefulSet, and the leader of a group. */ -}}
{{- define "stemserve.pod" -}}
{{- $v := .Values -}}
{{- $placed := $v -}}
{{- if include "stemserve.hasGroups" . }}{{ $placed = $v.leaderWorkerSet.leader }}{{ end -}}
metadata:
  labels:
    {{- include "stemserve.serverLabels" . | nindent 4 }}
    {{- if eq $v.router.mode "inferencePool" }}
    llm-d.ai/engine-type: stemserve
    {{- end }}
    {{- with $v.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    stemserve/config-hash: {{ include "stemserve.toml" . | sha256sum }}
    {{- with $v.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  {{- include "stemserve.podRules" (list . (include "stemserve.serverLabels" .) $placed) | nindent 2 }}
  terminationGracePeriodSeconds: {{ $v.terminationGracePeriodSeconds | int }}
  {{- if not (include "stemserve.hasGroups" .) }}{{ include "stemserve.claims" . | nindent 2 }}{{ end }}
  {{- include "stemserve.fetchModel" . | nindent 2 }}
  containers:
    - name: stemserve
      image: {{ include "stemserve.image" (list $v.image .Chart.AppVersion) }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      {{- if include "stemserve.hasGroups" . }}
      args: [serve, --config, /etc/stemserve/stemserve.toml, --worker, {{ printf "$(POD_NAME)-1.%s:50061" (include "stemserve.podDomain" .) }}]
      {{- else }}
      args: [serve, --config, /etc/stemserve/stemserve.toml]
      {{- end }}
      env:
        {{- if include "stemserve.hasGroups" . }}
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        {{- end }}
        {{- include "stemserve.env" . | nindent 8 }}
      ports:
        - {name: grpc, containerPort: 50051}
        - {name: health, containerPort: 50052}
        - {name: metrics, containerPort: 9400}
      startupProbe:
        grpc: {port: 50052}
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: {{ divf $v.probes.startupSeconds 5 | ceil | int }}
      livenessProbe:
        grpc: {port: 50052, service: liveness}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ divf $v.probes.livenessFailureSeconds 10 | ceil | int }}
      readinessProbe:
        grpc: {port: 50052, service: stemserve.v1.Inference}
        periodSeconds: {{ $v.probes.readinessPeriodSeconds | int }}
        timeoutSeconds: 2
        failureThreshold: 1
      securityContext: {{- include "stemserve.containerSecurity" . | nindent 8 }}
      {{- if include "stemserve.hasGroups" . }}
      resources: {{- toYaml $v.leaderWorkerSet.leader.resources | nindent 8 }}
      {{- else }}
      resources: {{- include "stemserve.resources" . | nindent 8 }}
      {{- end }}
      volumeMounts: {{- include "stemserve.mounts" . | nindent 8 }}
  volumes: {{- include "stemserve.volumes" . | nindent 4 }}
{{- end -}}

{{- /* What all pods with the server's image have. Takes context, labels, and where a pod may be placed. */ -}}
{{- define "stemserve.podRules" -}}
{{- $context := index . 0 -}}
{{- $labels := index . 1 -}}
{{- $placed := index . 2 -}}
{{- $v := $context.Values -}}
serviceAccountName: {{ include "stemserve.serviceAccount" $context }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- include "stemserve.podSecurity" $context | nindent 2 }}
{{- with $v.image.pullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $placed.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $placed.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $placed.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $placed.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $v.topologySpread }}
topologySpreadConstraints:
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- $labels | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "stemserve.fetchModel" -}}
{{- $v := .Values -}}
{{- if eq $v.model.source "download" }}
initContainers:
  - name: fetch-model
    image: {{ include "stemserve.image" (list $v.image .Chart.AppVersion) }}
    imagePullPolicy: {{ $v.image.pullPolicy }}
    command: [python, /etc/stemserve/fetch_model.py, /etc/stemserve/files.json, /models]
    {{- if $v.model.download.tokenSecret.name }}
    env:
      - name: MODEL_TOKEN
        valueFrom: {secretKeyRef: {{ toJson $v.model.download.tokenSecret }}}
    {{- end }}
    securityContext: {{- include "stemserve.containerSecurity" . | nindent 6 }}
    resources:
      requests: {cpu: 500m, memory: 256Mi}
      limits: {memory: 256Mi}
    volumeMounts:
      - {name: config, mountPath: /etc/stemserve, readOnly: true}
      - {name: models, mountPath: /models}
{{- end }}
{{- end -}}

{{- define "stemserve.env" -}}
- {name: HOME, value: /home/stemserve}
- {name: TRITON_CACHE_DIR, value: /home/stemserve/.cache/triton}
{{- with .Values.env }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end -}}

{{- define "stemserve.claims" -}}
{{- if and .Values.gpu.resourceClaimTemplate (gt (.Values.gpu.count | int) 0) }}
resourceClaims: [{name: gpu, resourceClaimTemplateName: {{ .Values.gpu.resourceClaimTemplate }}}]
{{- end }}
{{- end -}}

{{- define "stemserve.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if and .Values.gpu.resourceClaimTemplate (gt (.Values.gpu.count | int) 0) -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpu")) -}}
{{- else if gt (.Values.gpu.count | int) 0 -}}
{{- $gpu := dict .Values.gpu.resource (.Values.gpu.count | int) -}}
{{- $_ := set $resources "limits" (merge $gpu (default dict $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "stemserve.modelMounts" -}}
- {name: config, mountPath: /etc/stemserve, readOnly: true}
- {name: cache, mountPath: /home/stemserve/.cache}
- {name: temporary, mountPath: /tmp}
{{- if ne .Values.model.source "default" }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "stemserve.mounts" -}}
{{- include "stemserve.modelMounts" . }}
{{- if include "stemserve.hasGroups" . }}
{{- include "stemserve.groupTlsMount" .Values.leaderWorkerSet.tls.leaderSecretName }}
{{- end }}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /etc/stemserve-tls, readOnly: true}
{{- end }}
{{- if eq .Values.auth.mode "jwt" }}
- {name: jwks, mountPath: /etc/stemserve-jwks, readOnly: true}
{{- end }}
{{- end -}}

{{- define "stemserve.modelVolumes" -}}
{{- $v := .Values -}}
- name: config
  configMap: {name: {{ include "stemserve.fullname" . }}}
- name: cache
  emptyDir: {sizeLimit: {{ $v.cacheSizeLimit }}}
- name: temporary
  emptyDir: {sizeLimit: {{ $v.temporarySizeLimit }}}
{{- if eq $v.model.source "hostPath" }}
- name: models
  hostPath: {path: {{ $v.model.hostPath }}, type: Directory}
{{- else if eq $v.model.source "image" }}
- name: models
  image: {reference: {{ $v.model.image | quote }}, pullPolicy: {{ $v.image.pullPolicy }}}
{{- else if ne $v.model.source "default" }}
- name: models
  {{- if $v.model.existingClaim }}
  persistentVolumeClaim: {claimName: {{ $v.model.existingClaim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ $v.model.download.sizeLimit }}}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "stemserve.volumes" -}}
{{- $v := .Values -}}
{{- include "stemserve.modelVolumes" . }}
{{- if include "stemserve.hasGroups" . }}
{{- include "stemserve.groupTlsVolume" $v.leaderWorkerSet.tls.leaderSecretName }}
{{- end }}
{{- if $v.tls.secretName }}
- name: tls
  secret: {secretName: {{ $v.tls.secretName }}, defaultMode: 0440}
{{- end }}
{{- if eq $v.auth.mode "jwt" }}
- name: jwks
  secret: {secretName: {{ $v.auth.jwt.jwksSecret.name }}, defaultMode: 0440}
{{- end }}
{{- end -}}
