{{- /* How Prometheus reads the metrics of a process; the rules and the dashboards know the process by its job. */}}
{{- define "specd.scrape" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
path: /metrics
interval: {{ $root.Values.monitoring.intervalSeconds }}s
relabelings:
  - {targetLabel: job, replacement: {{ $component }}}
{{- if $root.Values.tls.enabled }}
scheme: https
tlsConfig:
  serverName: {{ $component }}.specd.internal
  ca:
    secret: {name: {{ $root.Values.tls.monitoringSecret }}, key: ca.crt}
  cert:
    secret: {name: {{ $root.Values.tls.monitoringSecret }}, key: tls.crt}
  keySecret: {name: {{ $root.Values.tls.monitoringSecret }}, key: tls.key}
{{- if eq $component "gateway" }}
authorization:
  credentials: {name: {{ $root.Values.monitoring.gatewayTokenSecret }}, key: token}
{{- end }}
{{- end }}
{{- end }}
