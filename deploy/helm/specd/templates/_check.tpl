{{- /* Values that are right each for itself, and do not fit each other. */}}
{{- define "specd.check" -}}
{{- $values := .Values -}}
{{- if and (eq (int $values.targets.replicas) 0) (not $values.targets.external) -}}
{{- fail "targets.replicas is 0 and targets.external is empty: there is no target. Set one of them" -}}
{{- end -}}
{{- if and $values.drafts.enabled (eq (int $values.drafts.replicas) 0) (not $values.drafts.external) -}}
{{- fail "drafts.replicas is 0 and drafts.external is empty: set one of them, or drafts.enabled to false" -}}
{{- end -}}
{{- if and $values.drafts.enabled $values.drafts.replicas $values.targets.replicas (ne (empty $values.targets.model) (empty $values.drafts.model)) -}}
{{- fail "only one of targets.model and drafts.model is set, and the included models fit each other alone: set both, or drafts.enabled to false" -}}
{{- end -}}
{{- range $kind := list "targets" "drafts" -}}
{{- $worker := get $values $kind -}}
{{- $update := $worker.rollingUpdate -}}
{{- if and (eq (toString $update.maxUnavailable) "0") (eq (toString $update.maxSurge) "0") -}}
{{- fail (printf "%s.rollingUpdate has maxUnavailable 0 and maxSurge 0: no pod could be replaced. Raise one of them" $kind) -}}
{{- end -}}
{{- if and $values.hub.offline $worker.model (not $worker.models) (or (empty $worker.cache) (hasKey $worker.cache "emptyDir")) -}}
{{- fail (printf "hub.offline is true, and %s.model is in no volume: set %s.models, or %s.cache to a volume that has it" $kind $kind $kind) -}}
{{- end -}}
{{- end -}}
{{- if and $values.coordinators.sessionServer.url $values.coordinators.sessionServer.existingSecret -}}
{{- fail "coordinators.sessionServer.url and coordinators.sessionServer.existingSecret are both set: leave out one" -}}
{{- end -}}
{{- if and (ne $values.coordinators.service.type "ClusterIP") (not $values.tls.enabled) -}}
{{- fail (printf "coordinators.service.type is %s, and tls.enabled is false: other machines could use it, in plaintext. Set tls.enabled, or put a proxy with TLS before the ClusterIP" $values.coordinators.service.type) -}}
{{- end -}}
{{- if $values.tls.enabled -}}
{{- $needed := list "coordinatorSecret" -}}
{{- if $values.targets.replicas -}}{{- $needed = append $needed "targetSecret" -}}{{- end -}}
{{- if and $values.drafts.enabled $values.drafts.replicas -}}{{- $needed = append $needed "draftSecret" -}}{{- end -}}
{{- if $values.gateway.enabled -}}{{- $needed = append $needed "gatewaySecret" -}}{{- end -}}
{{- if $values.monitoring.podMonitor -}}{{- $needed = append $needed "monitoringSecret" -}}{{- end -}}
{{- range $needed -}}
{{- if not (get $values.tls .) -}}{{- fail (printf "tls.enabled is true, and tls.%s is empty: name the Secret with this certificate" .) -}}{{- end -}}
{{- end -}}
{{- if and $values.gateway.enabled (not $values.tokensSecret) -}}
{{- fail "tls.enabled and gateway.enabled are true, and tokensSecret is empty: the probes of a gateway that asks for certificates have none. Set tokensSecret, or gateway.enabled to false" -}}
{{- end -}}
{{- end -}}
{{- if gt (int $values.targets.ranks) 1 -}}
{{- range $name := list "self-draft" "adapters" -}}
{{- if not (has (get $values.targets.settings $name) (list "" "none")) -}}
{{- fail (printf "targets.ranks is %d, and targets.settings.%s is set, which a target in several ranks has not: leave out one" (int $values.targets.ranks) $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $values.autoscaling.enabled (eq (int $values.targets.replicas) 0) -}}
{{- fail "autoscaling.enabled is true, and targets.replicas is 0: there is nothing to scale" -}}
{{- end -}}
{{- if gt (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas) -}}
{{- fail "autoscaling.minReplicas is greater than autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and $values.autoscaling.enabled (not $values.monitoring.podMonitor) (not $values.autoscaling.query) -}}
{{- fail "autoscaling.query is empty, and its default reads the labels of the PodMonitor: set monitoring.podMonitor to true, or a query" -}}
{{- end -}}
{{- if and (or $values.httpRoute.enabled $values.inferencePool.enabled) (not $values.gateway.enabled) -}}
{{- fail "httpRoute.enabled and inferencePool.enabled need gateway.enabled: they lead to the gateways' HTTP APIs" -}}
{{- end -}}
{{- end }}
