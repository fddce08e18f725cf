{{- /* A kind of workers in the cluster; of a list: the chart, the component, its values, its Secret with certificates. */}}
{{- define "specd.worker" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}{{- $values := index . 2 -}}
{{- $name := printf "%s-%s" (include "specd.fullname" $root) $component -}}
{{- $labels := include "specd.labels" (list $root $component) -}}
{{- $selector := include "specd.selector" (list $root $component) -}}
{{- $ranks := int (default 1 $values.ranks) -}}
{{- $scales := and (eq $component "target-worker") $root.Values.autoscaling.enabled -}}
{{- if gt $ranks 1 -}}
# A replica is a group of pods with a part of the model each. If one process ends, all of its group end and meet again,
# so no pod is recreated.
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
spec:
  {{- if not $scales }}
  replicas: {{ $values.replicas }}
  {{- end }}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration: {{- toYaml $values.rollingUpdate | nindent 6 }}
  leaderWorkerTemplate:
    size: {{ $ranks }}
    restartPolicy: None
    leaderTemplate: {{- include "specd.workerPod" . | nindent 6 }}
    workerTemplate: {{- include "specd.workerPod" (list $root "target-follower" $values (index . 3)) | nindent 6 }}
{{- else -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
spec:
  {{- if not $scales }}
  replicas: {{ $values.replicas }}
  {{- end }}
  selector:
    matchLabels: {{- $selector | nindent 6 }}
  strategy:
    rollingUpdate: {{- toYaml $values.rollingUpdate | nindent 6 }}
  # Coordinators look the workers up every 5 seconds, and name servers keep an answer for up to 30: they know a new worker
  # before an old one stops.
  minReadySeconds: 40
  progressDeadlineSeconds: {{ add $values.startupSeconds 300 }}
  template: {{- include "specd.workerPod" . | nindent 4 }}
{{- end }}
---
# Headless, so that coordinators see each ready worker.
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}s
  labels: {{- $labels | nindent 4 }}
spec:
  clusterIP: None
  selector:
    {{- $selector | nindent 4 }}
    specd-revision: {{ include "specd.revision" (list $root $values) | quote }}
  ports:
    - {name: grpc, port: {{ include "specd.port" $component }}, targetPort: grpc}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
spec:
  maxUnavailable: 1
  # A worker that is not ready serves nobody, and does not keep a node from being emptied.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- ternary (include "specd.ranks" $root) $selector (gt $ranks 1) | nindent 6 }}
{{- end }}

{{- /* The pods of workers, or of followers of a target's rank 0; of a list as above. */}}
{{- define "specd.workerPod" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}{{- $values := index . 2 -}}
{{- $follows := eq $component "target-follower" -}}
{{- $ranks := int (default 1 $values.ranks) -}}
{{- $process := ternary "target-worker" $component $follows -}}
{{- $gpus := int $values.gpus -}}
metadata:
  labels:
    {{- include "specd.selector" (list $root $component) | nindent 4 }}
    {{- if gt $ranks 1 }}
    specd-ranks: "true"
    {{- end }}
    specd-revision: {{ include "specd.revision" (list $root $values) | quote }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "specd.pod" (list $root $values) | nindent 2 }}
  {{- include "specd.spread" (list $root $values $component) | nindent 2 }}
  # It ends calls 3 seconds after the drain, and the process soon after.
  terminationGracePeriodSeconds: {{ add $values.drainSeconds 15 }}
  containers:
    - name: {{ $component }}
      image: {{ include "specd.workerImage" (list $root $values) }}
      imagePullPolicy: {{ $root.Values.images.pullPolicy }}
      args:
        - --log-level={{ $root.Values.logLevel }}
        - {{ $process }}
        {{- if $follows }}
        - --follow=$(LWS_LEADER_ADDRESS):{{ include "specd.ranksPort" . }}
        {{- else }}
        - --listen=0.0.0.0:{{ include "specd.port" $component }}
        - --metrics-listen=0.0.0.0:{{ include "specd.metricsPort" $component }}
        {{- if gt $ranks 1 }}
        - --ranks={{ $ranks }}
        - --ranks-listen=0.0.0.0:{{ include "specd.ranksPort" . }}
        {{- end }}
        {{- end }}
        {{- include "specd.identity" (list $root true) | trim | nindent 8 }}
        {{- with $values.model }}
        - {{ printf "--model=%s" . | quote }}
        {{- end }}
        {{- if not $follows }}
        - --shutdown-grace-seconds={{ $values.drainSeconds }}
        {{- end }}
        {{- with include "specd.options" $values.settings | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      env:
        - {name: XDG_CACHE_HOME, value: /home/specd/.cache}
        - {name: HF_HOME, value: /home/specd/.cache/huggingface}
        {{- if $root.Values.hub.offline }}
        - {name: HF_HUB_OFFLINE, value: "1"}
        {{- end }}
        {{- with $root.Values.hub.tokenSecret }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ . }}, key: token}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if $follows }}
      # Rank 0 watches its followers, and ends with the first of them: they stop after its drain.
      lifecycle: {preStop: {sleep: {seconds: {{ add $values.drainSeconds 5 }}}}}
      {{- else }}
      ports:
        - {name: grpc, containerPort: {{ include "specd.port" $component }}}
        - {name: metrics, containerPort: {{ include "specd.metricsPort" $component }}}
        {{- if gt $ranks 1 }}
        - {name: ranks, containerPort: {{ include "specd.ranksPort" . }}}
        {{- end }}
      # A pod without a model after this time is started again.
      startupProbe:
        {{- include "specd.probe" (list $root $component "") | trim | nindent 8 }}
        failureThreshold: {{ div (add $values.startupSeconds 19) (ternary 20 10 $root.Values.tls.enabled) }}
      livenessProbe:
        {{- include "specd.probe" (list $root $component "liveness") | trim | nindent 8 }}
        failureThreshold: 6
      readinessProbe:
        {{- include "specd.probe" (list $root $component "") | trim | nindent 8 }}
        failureThreshold: 3
      {{- end }}
      resources:
        {{- $resources := deepCopy $values.resources }}
        {{- if $gpus }}
        {{- $resources = merge $resources (dict "limits" (dict "nvidia.com/gpu" $gpus)) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      securityContext: {{- include "specd.containerSecurity" . | trim | nindent 8 }}
      volumeMounts:
        - {name: cache, mountPath: /home/specd/.cache}
        {{- if $gpus }}
        - {name: tmp, mountPath: /tmp}
        {{- end }}
        {{- if $values.models }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if $root.Values.tls.enabled }}
        - {name: tls, mountPath: /tls, readOnly: true}
        {{- end }}
  volumes:
    - name: cache
      {{- toYaml (default (dict "emptyDir" dict) $values.cache) | nindent 6 }}
    {{- if $gpus }}
    - name: tmp
      emptyDir: {}
    {{- end }}
    {{- with $values.models }}
    - name: models
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- if $root.Values.tls.enabled }}
    - name: tls
      {{- include "specd.secretVolume" (index . 3) | nindent 6 }}
    {{- end }}
{{- end }}

{{- /* Workers outside of the cluster: a Service without a selector, and their addresses; of a list as above. */}}
{{- define "specd.externalWorkers" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}{{- $values := index . 2 -}}
{{- $name := printf "%s-%ss-external" (include "specd.fullname" $root) $component -}}
{{- $labels := include "specd.labels" (list $root (printf "%s-external" $component)) -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
spec:
  clusterIP: None
  ports:
    - {name: grpc, port: {{ $values.externalPort }}}
    - {name: metrics, port: {{ $values.externalMetricsPort }}}
{{- range $family := list "IPv4" "IPv6" }}
{{- with include "specd.ofFamily" (list $values.external $family) | fromJsonArray }}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {{ $name }}-{{ lower $family }}
  labels:
    {{- $labels | nindent 4 }}
    kubernetes.io/service-name: {{ $name }}
    endpointslice.kubernetes.io/managed-by: {{ $root.Release.Service | lower }}
addressType: {{ $family }}
ports:
  - {name: grpc, port: {{ $values.externalPort }}, protocol: TCP}
  - {name: metrics, port: {{ $values.externalMetricsPort }}, protocol: TCP}
# Coordinators see for themselves which of them answers.
endpoints:
  {{- range . }}
  - addresses: [{{ . | quote }}]
    conditions: {ready: true}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "specd.ofFamily" -}}
{{- $found := list -}}
{{- range $address := index . 0 -}}
{{- if eq (ternary "IPv6" "IPv4" (contains ":" $address)) (index $ 1) -}}
{{- $found = append $found $address -}}
{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end }}
