{{- /* Options of a process, from settings. Helm reads all numbers as floats, and would write 1000000 as 1e+06. */}}
{{- define "specd.options" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $name }}
{{- else if and (kindIs "float64" $value) (eq (floor $value) $value) }}
- --{{ $name }}={{ printf "%.0f" $value }}
{{- else }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Certificates of a process, or --insecure; of a list: the chart and whether it has an authority of its peers. */}}
{{- define "specd.identity" -}}
{{- if (index . 0).Values.tls.enabled }}
- --tls-cert=/tls/tls.crt
- --tls-key=/tls/tls.key
{{- if index . 1 }}
- --tls-ca=/tls/ca.crt
{{- end }}
{{- else }}
- --insecure
{{- end }}
{{- end }}

{{- /* How a gRPC probe asks: over TLS by `specd health`, because the kubelet's own has no TLS. */}}
{{- define "specd.probe" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}{{- $service := index . 2 -}}
{{- if $root.Values.tls.enabled }}
exec:
  command:
    - specd
    - health
    - 127.0.0.1:{{ include "specd.port" $component }}
    {{- with $service }}
    - --service={{ . }}
    {{- end }}
    - --timeout-seconds=8
    - --tls-ca=/tls/ca.crt
    - --tls-cert=/tls/tls.crt
    - --tls-key=/tls/tls.key
    - --tls-name={{ $component }}.specd.internal
{{- else }}
grpc:
  port: {{ include "specd.port" $component }}
  {{- with $service }}
  service: {{ . }}
  {{- end }}
{{- end }}
timeoutSeconds: 10
periodSeconds: {{ ternary 20 10 $root.Values.tls.enabled }}
{{- end }}

{{- define "specd.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* The parts of a pod that every process has; of a list: the chart, and the values of the process. */}}
{{- define "specd.pod" -}}
{{- $root := index . 0 -}}{{- $values := index . 1 -}}
automountServiceAccountToken: false
# Otherwise a Service of this name sets variables such as SPECD_PORT.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with get $values $key }}
{{ $key }}:
  {{- if kindIs "string" . }} {{ . }}{{ else }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "specd.spread" -}}
{{- $values := index . 1 -}}
topologySpreadConstraints:
  {{- with $values.topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "specd.selector" (list (index . 0) (index . 2)) | nindent 8 }}
  {{- end }}
{{- end }}

{{- /* A Secret as files: the group is the pod's fsGroup. */}}
{{- define "specd.secretVolume" -}}
secret:
  secretName: {{ . }}
  defaultMode: 0440
{{- end }}
