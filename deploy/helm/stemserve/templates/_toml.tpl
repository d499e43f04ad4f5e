{{- define "stemserve.tomlValue" -}}
{{- if kindIs "string" . -}}
{{ toJson . }}
{{- else if kindIs "slice" . -}}
[{{ range $i, $value := . }}{{ if $i }}, {{ end }}{{ include "stemserve.tomlValue" $value }}{{ end }}]
{{- else if kindIs "float64" . -}}
{{- if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{- /* The scalars and lists of a map, one line each. */ -}}
{{- define "stemserve.tomlLines" -}}
{{- range $key, $value := . }}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ $key }} = {{ include "stemserve.tomlValue" $value }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "stemserve.modelPath" -}}
{{- $path := .Values.model.path -}}
{{- if and (eq .Values.model.source "download") (not $path) (eq (len .Values.model.download.files) 1) -}}
{{- $path = (first .Values.model.download.files).name -}}
{{- end -}}
{{- printf "/models/%s" $path | trimSuffix "/" -}}
{{- end -}}

{{- /* The keys of no table. */ -}}
{{- define "stemserve.topLines" -}}
{{- $top := set (deepCopy .Values.settings) "model_cache" "/home/stemserve/.cache/stemserve" -}}
{{- if ne .Values.model.source "default" }}{{ $_ := set $top "model" (include "stemserve.modelPath" .) }}{{ end -}}
{{- include "stemserve.tomlLines" $top | trim }}
{{- end -}}

{{- define "stemserve.workerLines" -}}
{{- $worker := dict "device" (ternary "cuda" "cpu" (gt (.Values.gpu.count | int) 0)) -}}
{{- $_ := set $worker "start_timeout_s" .Values.probes.startupSeconds -}}
{{- include "stemserve.tomlLines" (merge $worker .Values.settings.worker) }}
{{- end -}}

{{- /* What `stemserve worker --config` reads in a pod of its own. */ -}}
{{- define "stemserve.workerToml" -}}
{{ include "stemserve.topLines" . }}

[worker]
{{- include "stemserve.workerLines" . }}
{{- with dig "max_step_tokens" 0 .Values.settings.limits }}

[limits]
max_step_tokens = {{ . | int }}
{{- end }}
{{- end -}}

{{- define "stemserve.toml" -}}
{{- $v := .Values -}}
{{- $server := dict "host" "0.0.0.0" "port" 50051 "health_port" 50052 "metrics_port" 9400 -}}
{{- $_ := set $server "drain_s" $v.drain.seconds -}}
{{- $_ := set $server "drain_delay_s" $v.drain.delaySeconds -}}
{{ include "stemserve.topLines" . }}

[server]
{{- include "stemserve.tomlLines" (merge $server $v.settings.server) }}

[worker]
{{- include "stemserve.workerLines" . }}
{{- if and (include "stemserve.hasGroups" .) $v.leaderWorkerSet.tls.leaderSecretName }}
tls_ca = "/etc/stemserve-worker-tls/ca.crt"
tls_certificate = "/etc/stemserve-worker-tls/tls.crt"
tls_private_key = "/etc/stemserve-worker-tls/tls.key"
{{- end }}
{{- range $table, $values := omit $v.settings "server" "worker" }}
{{- if and (kindIs "map" $values) $values }}

[{{ $table }}]
{{- include "stemserve.tomlLines" $values }}
{{- end }}
{{- end }}
{{- if $v.tls.secretName }}

[tls]
certificate = "/etc/stemserve-tls/tls.crt"
private_key = "/etc/stemserve-tls/tls.key"
{{- if $v.tls.demandClientCertificate }}
client_ca = "/etc/stemserve-tls/ca.crt"
{{- end }}
{{- end }}
{{- if ne $v.auth.mode "none" }}

[auth]
mode = {{ toJson $v.auth.mode }}
{{- if eq $v.auth.mode "jwt" }}

[auth.jwt]
jwks = {{ printf "/etc/stemserve-jwks/%s" $v.auth.jwt.jwksSecret.key | toJson }}
issuer = {{ toJson $v.auth.jwt.issuer }}
audience = {{ toJson $v.auth.jwt.audience }}
tenant_claim = {{ toJson $v.auth.jwt.tenantClaim }}
{{- end }}
{{- end }}
{{- range $name, $tenant := $v.tenants }}

[tenants.{{ $name }}]
{{- include "stemserve.tomlLines" $tenant }}
{{- end }}
{{- end -}}
