{{/* Combinations of values that concern volumes, policies and monitors. */}}
{{- define "llm42.validateObjects" -}}
{{- $v := .Values -}}
{{- $h := $v.model.huggingface -}}
{{- $fetches := eq $v.model.source "huggingface" -}}
{{- if and $v.cache.claim.create $v.cache.volume -}}
{{- fail "cache.claim.create: cache.volume names a volume already: leave one of them" -}}
{{- end -}}
{{- if and $fetches $h.claim.create $h.volume -}}
{{- fail "model.huggingface.claim.create: model.huggingface.volume names a volume already: leave one of them" -}}
{{- end -}}
{{- $claims := dict "cache.claim" $v.cache.claim -}}
{{- if $fetches -}}{{- $_ := set $claims "model.huggingface.claim" $h.claim -}}{{- end -}}
{{- $pods := int (include "llm42.mostPods" .) -}}
{{- range $name, $claim := $claims -}}
{{- if and $claim.create (not (has "ReadWriteMany" $claim.accessModes)) (not (has "ReadOnlyMany" $claim.accessModes)) -}}
{{- if gt $pods 1 -}}
{{- fail (printf "%s.accessModes: up to %d pods mount it, on several nodes: give ReadWriteMany, or set %s.create to false" $name $pods $name) -}}
{{- end -}}
{{- if ne $v.upgrade.strategy "None" -}}
{{- fail (printf "%s.accessModes: at an upgrade the new cluster's pod waits for a volume that the old one's keeps until the new one runs: give ReadWriteMany, set upgrade.strategy to None, or set %s.create to false" $name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $fetches $h.job.enabled (not $h.claim.create) (not (hasKey $h.volume "persistentVolumeClaim")) -}}
{{- fail "model.huggingface.job.enabled: one download for all pods needs a claim that they share: set model.huggingface.claim.create, or volume.persistentVolumeClaim" -}}
{{- end -}}
{{- if and (gt (int $v.fastPath.hosts) 1) (or $v.fastPath.autoscaling.enabled (gt (int $v.fastPath.replicas) 1)) -}}
{{- fail "fastPath.hosts above 1 with more than one replica: Ray may spread a replica over pods of two groups of hosts: set fastPath.replicas to 1 without autoscaling, and install a release (or an entry of models) for each replica" -}}
{{- end -}}
{{- if and $v.podMonitor.enabled $v.serviceMonitor.enabled -}}
{{- fail "podMonitor and serviceMonitor: each series would come twice: enable one of them" -}}
{{- end -}}
{{- $roles := dict "head" $v.head "fastPath" $v.fastPath -}}
{{- if $v.verifier.dedicated -}}{{- $_ := set $roles "verifier" $v.verifier -}}{{- end -}}
{{- range $name, $values := $roles -}}
{{- $role := include "llm42.role" (dict "root" $ "values" $values) | fromYaml -}}
{{- $own := $role.terminationGracePeriodSeconds -}}
{{- $drain := "" -}}
{{- range $role.env -}}{{- if eq .name "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" -}}{{- $drain = "told" -}}{{- end -}}{{- end -}}
{{- if not (or (kindIs "invalid" $own) $role.preStop $drain) -}}
{{- $head := eq $name "head" -}}
{{- $least := int (include "llm42.preStopSeconds" (dict "root" $ "component" (ternary "head" "worker" $head))) -}}
{{- if not $head -}}{{- $least = add $least (int (include "llm42.nodeDrainSeconds" $)) -}}{{- end -}}
{{- if lt (int $own) (int $least) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds (or that of common): %d s are less than the %d that preStop and the drain take, so streams would be cut: give more, lower config.server.drain_s, or set preStop or RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S (env) too" $name (int $own) (int $least)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $n := $v.networkPolicy -}}
{{- if and $n.enabled $n.egress.enabled -}}
{{- if and $fetches (not $n.egress.extra) -}}
{{- fail "networkPolicy.egress.extra: with model.source huggingface pods download the model: allow the way to the Hub, or to your proxy or mirror" -}}
{{- end -}}
{{- if and (eq (dig "telemetry" "traces" "off" $v.config | toString) "otlp") (not $n.egress.extra) -}}
{{- fail "networkPolicy.egress.extra: config.telemetry.traces is otlp: allow the way to the collector" -}}
{{- end -}}
{{- if and (eq (include "llm42.scales" .) "true") (not $n.egress.kubernetesApi) -}}
{{- fail "networkPolicy.egress.kubernetesApi: Ray's autoscaler asks the Kubernetes API: give its addresses (kubectl get endpointslices -n default kubernetes)" -}}
{{- end -}}
{{- end -}}
{{- end -}}
