{{- /* Envoy's configuration. Servers hash by their names, which outlive their pods, but for a Deployment's. */ -}}
{{- define "stemserve.envoy" -}}
{{- $v := .Values -}}
{{- $named := ne $v.workload "Deployment" -}}
{{- $servers := include "stemserve.podDomain" . -}}
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 9901}}}
static_resources:
  listeners:
    - name: calls
      address: {socket_address: {address: 0.0.0.0, port_value: 50051}}
      per_connection_buffer_limit_bytes: 1048576
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: calls
                codec_type: HTTP2
                stream_idle_timeout: 0s
                http2_protocol_options: {max_concurrent_streams: {{ $v.router.maxRequests | int }}}
                route_config:
                  name: calls
                  virtual_hosts:
                    - name: servers
                      domains: ["*"]
                      routes:
                        - match: {prefix: /, grpc: {}}
                          route:
                            cluster: servers
                            timeout: 0s
                            hash_policy: [{header: {header_name: x-prefix-id}}]
                            retry_policy:
                              retry_on: connect-failure,refused-stream,unavailable
                              num_retries: 1
                              host_selection_retry_max_attempts: 5
                              retry_host_predicate:
                                - name: envoy.retry_host_predicates.previous_hosts
                                  typed_config: {"@type": type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate}
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
          {{- if $v.tls.secretName }}
          transport_socket:
            name: envoy.transport_sockets.tls
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
              {{- if $v.tls.demandClientCertificate }}
              require_client_certificate: true
              {{- end }}
              common_tls_context:
                alpn_protocols: [h2]
                {{- include "stemserve.envoyCertificate" . | nindent 16 }}
                {{- if $v.tls.demandClientCertificate }}
                validation_context: {trusted_ca: {filename: /etc/stemserve-tls/ca.crt}}
                {{- end }}
          {{- end }}
    # For probes and Prometheus: nothing else of the admin interface can be reached.
    - name: status
      address: {socket_address: {address: 0.0.0.0, port_value: 9902}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: status
                route_config:
                  name: status
                  virtual_hosts:
                    - name: status
                      domains: ["*"]
                      routes:
                        - {match: {path: /ready}, route: {cluster: admin}}
                        - {match: {path: /stats/prometheus}, route: {cluster: admin}}
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
    - name: admin
      type: STATIC
      load_assignment:
        cluster_name: admin
        endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9901}}}}]}]
    - name: servers
      type: STRICT_DNS
      dns_refresh_rate: 2s
      respect_dns_ttl: false
      connect_timeout: 1s
      lb_policy: MAGLEV
      maglev_lb_config: {table_size: 65537}
      common_lb_config:
        healthy_panic_threshold: {value: 0}
        consistent_hashing_lb_config:
          hash_balance_factor: {{ $v.router.hashBalanceFactor | int }}
          {{- if $named }}
          use_hostname_for_hashing: true
          {{- end }}
      circuit_breakers:
        thresholds:
          - max_requests: {{ $v.router.maxRequests | int }}
            max_pending_requests: {{ $v.router.maxRequests | int }}
            # All calls of a server that dies are tried again elsewhere at once.
            max_retries: {{ $v.router.maxRequests | int }}
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config:
            http2_protocol_options: {connection_keepalive: {interval: 30s, timeout: 10s}}
      health_checks:
        - timeout: 1s
          interval: 1s
          no_traffic_interval: 1s
          unhealthy_threshold: 1
          healthy_threshold: 1
          grpc_health_check: {service_name: stemserve.v1.Inference}
      {{- if $v.tls.secretName }}
      transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
          sni: {{ include "stemserve.address" . }}
          common_tls_context:
            alpn_protocols: [h2]
            {{- if $v.tls.demandClientCertificate }}
            {{- include "stemserve.envoyCertificate" . | nindent 12 }}
            {{- end }}
            validation_context:
              trusted_ca: {filename: /etc/stemserve-tls/ca.crt}
              match_typed_subject_alt_names: [{san_type: DNS, matcher: {exact: {{ include "stemserve.address" . }}}}]
      {{- end }}
      load_assignment:
        cluster_name: servers
        endpoints:
          - lb_endpoints:
              {{- if $named }}
              {{- range $i := until (include "stemserve.mostReplicas" . | int) }}
              {{- $name := printf "%s-%d.%s" (include "stemserve.workloadName" $) $i $servers }}
              - endpoint: {hostname: {{ $name }}, address: {socket_address: {address: {{ $name }}, port_value: 50051}}}
              {{- end }}
              {{- else }}
              - endpoint: {address: {socket_address: {address: {{ $servers }}, port_value: 50051}}}
              {{- end }}
{{- end -}}

{{- define "stemserve.envoyCertificate" -}}
tls_certificates:
  - certificate_chain: {filename: /etc/stemserve-tls/tls.crt}
    private_key: {filename: /etc/stemserve-tls/tls.key}
{{- end -}}
