{{- /* The pod with the GPU in a LeaderWorkerSet. Its leader is the pod of a server without a GPU. */ -}}
{{- define "stemserve.workerPod" -}}
{{- $v := .Values -}}
{{- $placed := $v -}}
{{- if not $v.affinity }}{{ $placed = set (deepCopy $v) "affinity" (include "stemserve.nearLeader" . | fromYaml) }}{{ end -}}
metadata:
  labels:
    {{- include "stemserve.workerLabels" . | nindent 4 }}
    {{- with $v.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    stemserve/config-hash: {{ include "stemserve.workerToml" . | sha256sum }}
    {{- with $v.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  {{- include "stemserve.podRules" (list . (include "stemserve.workerLabels" .) $placed) | nindent 2 }}
  terminationGracePeriodSeconds: 30
  {{- include "stemserve.claims" . | nindent 2 }}
  {{- include "stemserve.fetchModel" . | nindent 2 }}
  containers:
    - name: worker
      image: {{ include "stemserve.image" (list $v.image .Chart.AppVersion) }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args:
        - worker
        - --config=/etc/stemserve/worker.toml
        - --listen=0.0.0.0:50061
        - --health-listen=0.0.0.0:50052
        {{- if $v.leaderWorkerSet.tls.workerSecretName }}
        - --tls-certificate=/etc/stemserve-worker-tls/tls.crt
        - --tls-private-key=/etc/stemserve-worker-tls/tls.key
        - --tls-client-ca=/etc/stemserve-worker-tls/ca.crt
        {{- end }}
      env: {{- include "stemserve.env" . | nindent 8 }}
      ports:
        - {name: worker, containerPort: 50061}
        - {name: health, containerPort: 50052}
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
        grpc: {port: 50052, service: stemserve.v1.Worker}
        periodSeconds: {{ $v.probes.readinessPeriodSeconds | int }}
        timeoutSeconds: 2
        failureThreshold: 1
      securityContext: {{- include "stemserve.containerSecurity" . | nindent 8 }}
      resources: {{- include "stemserve.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "stemserve.modelMounts" . | nindent 8 }}
        {{- include "stemserve.groupTlsMount" $v.leaderWorkerSet.tls.workerSecretName | nindent 8 }}
  volumes:
    {{- include "stemserve.modelVolumes" . | nindent 4 }}
    {{- include "stemserve.groupTlsVolume" $v.leaderWorkerSet.tls.workerSecretName | nindent 4 }}
{{- end -}}

{{- /* Each step goes over the network between them. Only a wish: free GPUs come first. */ -}}
{{- define "stemserve.nearLeader" -}}
podAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: topology.kubernetes.io/zone
        labelSelector:
          matchLabels: {{- include "stemserve.serverLabels" . | nindent 12 }}
        matchLabelKeys: [leaderworkerset.sigs.k8s.io/group-index]
{{- end -}}

{{- define "stemserve.groupTlsMount" -}}
{{- if . }}
- {name: worker-tls, mountPath: /etc/stemserve-worker-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "stemserve.groupTlsVolume" -}}
{{- with . }}
- name: worker-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}
