{{- define "specd.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- /* The labels of pods by which Deployments and Services select them; of a list: the chart and a component. */}}
{{- define "specd.selector" -}}
{{- include "specd.release" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- /* The labels of all pods of a release; of the chart. */}}
{{- define "specd.release" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "specd.labels" -}}
{{- $root := index . 0 -}}
{{ include "specd.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{- define "specd.image" -}}
{{- $root := index . 0 -}}
{{- with $root.Values.images.registry }}{{ trimSuffix "/" . }}/{{ end }}
{{- index . 1 }}:{{ default $root.Chart.AppVersion $root.Values.images.tag }}
{{- end }}

{{- define "specd.workerImage" -}}
{{- $root := index . 0 -}}
{{- include "specd.image" (list $root (ternary $root.Values.images.workerCuda $root.Values.images.worker (gt (int (index . 1).gpus) 0))) }}
{{- end }}

{{- /*
Coordinators refuse a target with other weights or adapters than the first one's, and processes of one release belong
together. So workers have a label for model, image and TLS, the Services of workers select it, and coordinators are
replaced with it: a change leads new coordinators to new workers, and old ones keep the old.
*/}}
{{- define "specd.revision" -}}
{{- $root := index . 0 -}}{{- $values := index . 1 -}}
{{- $settings := pick $values.settings "self-draft" "kv-bits" "kv-group-size" "adapters" -}}
{{- list $values.model $settings (int (default 1 $values.ranks)) $root.Values.tls.enabled (include "specd.workerImage" .) | toJson | sha256sum | trunc 10 }}
{{- end }}

{{- /* The names under which clients in the cluster reach the gateways, and those of the values. */}}
{{- define "specd.hosts" -}}
{{- $full := include "specd.fullname" . -}}
{{- $hosts := list -}}
{{- range $name := list $full (printf "%s-coordinators" $full) -}}
{{- range $suffix := list "" (printf ".%s" $.Release.Namespace) (printf ".%s.svc" $.Release.Namespace) (printf ".%s.svc.%s" $.Release.Namespace $.Values.clusterDomain) -}}
{{- $hosts = append $hosts (print $name $suffix) -}}
{{- end -}}
{{- end -}}
{{- join "," (concat $hosts .Values.gateway.hosts) -}}
{{- end }}

{{- /* All addresses of a kind of workers, for --target and --draft. */}}
{{- define "specd.addresses" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}{{- $values := index . 2 -}}
{{- $service := printf "%s-%ss" (include "specd.fullname" $root) $component -}}
{{- $domain := printf "%s.svc" $root.Release.Namespace -}}
{{- $found := list -}}
{{- if gt (int $values.replicas) 0 -}}
{{- $found = append $found (printf "dns:%s.%s:%s" $service $domain (include "specd.port" $component)) -}}
{{- end -}}
{{- if $values.external -}}
{{- $found = append $found (printf "dns:%s-external.%s:%d" $service $domain (int $values.externalPort)) -}}
{{- end -}}
{{- join "," $found -}}
{{- end }}

{{- define "specd.port" -}}
{{- get (dict "coordinator" "50051" "draft-worker" "50052" "target-worker" "50053") . }}
{{- end }}

{{- /* Where rank 0 of a target waits for its followers. */}}
{{- define "specd.ranksPort" -}}
50054
{{- end }}

{{- /* The labels of the pods that hold a target together; of the chart. */}}
{{- define "specd.ranks" -}}
{{- include "specd.release" . }}
specd-ranks: "true"
{{- end }}

{{- define "specd.metricsPort" -}}
{{- get (dict "coordinator" "9464" "draft-worker" "9465" "target-worker" "9466") . }}
{{- end }}
