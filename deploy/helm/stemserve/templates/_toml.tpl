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

{{- define "stemserve.toml" -}}
{{- $v := .Values -}}
{{- $top := omit $v.settings "server" "worker" -}}
{{- $_ := set $top "model_cache" "/home/stemserve/.cache/stemserve" -}}
{{- if ne $v.model.source "default" }}{{ $_ := set $top "model" (include "stemserve.modelPath" .) }}{{ end -}}
{{- $server := dict "host" "0.0.0.0" "port" 50051 "health_port" 50052 "metrics_port" 9400 -}}
{{- $_ := set $server "drain_s" $v.drain.seconds -}}
{{- $_ := set $server "drain_delay_s" $v.drain.delaySeconds -}}
{{- $worker := dict "device" (ternary "cuda" "cpu" (gt ($v.gpu.count | int) 0)) -}}
{{- include "stemserve.tomlLines" $top | trim }}

[server]
{{- include "stemserve.tomlLines" (merge $server $v.settings.server) }}

[worker]
{{- include "stemserve.tomlLines" (merge $worker $v.settings.worker) }}
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
