{{- define "stemserve.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "stemserve.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "stemserve.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "stemserve.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "stemserve.instance" -}}
app.kubernetes.io/name: {{ include "stemserve.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "stemserve.serverLabels" -}}
{{ include "stemserve.instance" . }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "stemserve.routerLabels" -}}
{{ include "stemserve.instance" . }}
app.kubernetes.io/component: router
{{- end -}}

{{- /* Of the pods with the GPUs in a LeaderWorkerSet; its leaders are the servers. */ -}}
{{- define "stemserve.workerLabels" -}}
{{ include "stemserve.instance" . }}
app.kubernetes.io/component: worker
{{- end -}}

{{- define "stemserve.testLabels" -}}
{{ include "stemserve.instance" . }}
app.kubernetes.io/component: test
{{- end -}}

{{- define "stemserve.labels" -}}
{{ include "stemserve.instance" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "stemserve.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "stemserve.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* Takes an image's values and the tag to use without one. */ -}}
{{- define "stemserve.image" -}}
{{- $image := index . 0 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default (index . 1) $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "stemserve.hasGroups" -}}
{{- if eq .Values.workload "LeaderWorkerSet" }}true{{ end -}}
{{- end -}}

{{- /* What holds the servers' pods. A LeaderWorkerSet's headless Service has its name, so it cannot be ours. */ -}}
{{- define "stemserve.workloadName" -}}
{{ include "stemserve.fullname" . }}{{ if include "stemserve.hasGroups" . }}-group{{ end }}
{{- end -}}

{{- define "stemserve.workloadApi" -}}
{{ if include "stemserve.hasGroups" . }}leaderworkerset.x-k8s.io/v1{{ else }}apps/v1{{ end }}
{{- end -}}

{{- /* The domain of pods that keep their names: NAME-0, NAME-1, ..., and NAME-0-1, ... of workers. */ -}}
{{- define "stemserve.podDomain" -}}
{{- $service := printf "%s-servers" (include "stemserve.fullname" .) -}}
{{- if include "stemserve.hasGroups" . }}{{ $service = include "stemserve.workloadName" . }}{{ end -}}
{{- printf "%s.%s.svc" $service .Release.Namespace -}}
{{- end -}}

{{- define "stemserve.mostReplicas" -}}
{{- if eq .Values.autoscaling.kind "none" }}{{ .Values.replicas | int }}{{ else }}{{ .Values.autoscaling.max | int }}{{ end -}}
{{- end -}}

{{- /* The pod-wide and the container's part of the "restricted" pod security standard. */ -}}
{{- define "stemserve.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.user | int64 }}
runAsGroup: {{ .Values.podSecurity.group | int64 }}
fsGroup: {{ .Values.podSecurity.group | int64 }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "stemserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* The name by which callers, and with TLS the router, know the servers. */ -}}
{{- define "stemserve.address" -}}
{{ include "stemserve.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end -}}
