{{/* What values.schema.json cannot say: combinations. Every message says what to do. */}}
{{- define "llm42.validate" -}}
{{- $v := .Values -}}
{{- $cuda := eq (dig "model" "device" "cpu" $v.config) "cuda" -}}
{{- $engine := default dict $v.config.engine -}}
{{- $vllm := default dict $engine.vllm -}}
{{- $kind := default "torch" $engine.kind -}}
{{- $isVllm := eq $kind "vllm" -}}
{{- $alone := eq $kind "canonical" -}}
{{- $tp := ternary (int (default 1 $vllm.tensor_parallel_size)) 1 $isVllm -}}
{{- $gpus := int $v.fastPath.gpu.count -}}
{{- $hosts := int $v.fastPath.hosts -}}

{{- if hasKey (default dict $v.config.model) "path" -}}
{{- fail "config.model.path: set model.source and model.path instead; the chart mounts the files and knows where" -}}
{{- end -}}
{{- range $name := list "host" "port" -}}
{{- if hasKey (default dict $v.config.server) $name -}}
{{- fail (printf "config.server.%s is of `llm42 serve` alone: set serve.port; pods listen on all addresses" $name) -}}
{{- end -}}
{{- end -}}
{{- if hasKey (default dict $v.config.telemetry) "metrics_port" -}}
{{- fail "config.telemetry.metrics_port is of `llm42 serve` alone: pods show their metrics on port 8080" -}}
{{- end -}}
{{- include "llm42.validateModel" . -}}

{{- if and $alone $v.verifier.dedicated (gt $gpus 0) -}}
{{- fail "fastPath.gpu.count: with config.engine.kind canonical replicas take no GPU, and dedicated verifiers have their own: set it to 0" -}}
{{- end -}}
{{- if and $cuda (lt $gpus 1) (not (and $alone $v.verifier.dedicated)) -}}
{{- fail "config.model.device is cuda, but fastPath.gpu.count is 0: ask for at least one GPU a pod" -}}
{{- end -}}
{{- if and (not $cuda) (gt $gpus 0) -}}
{{- fail "fastPath.gpu.count is above 0, but config.model.device is cpu: set it to cuda, or the count to 0" -}}
{{- end -}}
{{- if and (not $cuda) (eq (int (default 0 $engine.threads)) 0) -}}
{{- fail "config.engine.threads: give a number: 0 means half of the cores of the node, not of the pod" -}}
{{- end -}}
{{- if and $v.verifier.dedicated $cuda (lt (int $v.verifier.gpu.count) 1) -}}
{{- fail "verifier.gpu.count: a dedicated verifier needs a GPU" -}}
{{- end -}}
{{- if and $isVllm (not $cuda) -}}
{{- fail "config.engine.kind vllm needs config.model.device: cuda" -}}
{{- end -}}
{{- if and $cuda (eq $hosts 1) -}}
{{- $used := ternary 0.0 (mulf (default 0.9 $engine.gpus) $tp) $alone -}}
{{- $verifier := default dict $v.config.verifier -}}
{{- if not $v.verifier.dedicated -}}{{- $used = addf $used (default (ternary 1.0 0.1 $alone) $verifier.gpus) -}}{{- end -}}
{{- if and $v.verifier.dedicated (gt (float64 $v.verifier.gpu.count) (ceil (default (ternary 1.0 0.1 $alone) $verifier.gpus))) -}}
{{- fail (printf "verifier.gpu.count is %d, but a verifier takes config.verifier.gpus = %v: the rest would be idle" (int $v.verifier.gpu.count) (default (ternary 1.0 0.1 $alone) $verifier.gpus)) -}}
{{- end -}}
{{- if gt (float64 $gpus) (ceil $used) -}}
{{- fail (printf "fastPath.gpu.count is %d, but a pod uses %v of them: the rest would be idle. A pod has one replica: raise fastPath.replicas, or config.engine.vllm.tensor_parallel_size" $gpus $used) -}}
{{- end -}}
{{- if gt $used (float64 $gpus) -}}
{{- fail (printf "fastPath.gpu.count is %d, but its replica%s %v: config.engine.gpus x config.engine.vllm.tensor_parallel_size%s" $gpus (ternary " takes" " and verifier take" $v.verifier.dedicated) $used (ternary "" " + config.verifier.gpus" $v.verifier.dedicated)) -}}
{{- end -}}
{{- end -}}
{{- include "llm42.validateHosts" (dict "v" $v "isVllm" $isVllm "vllm" $vllm "hosts" $hosts "tp" $tp) -}}
{{- include "llm42.validateOperations" . -}}
{{- include "llm42.validateObjects" . -}}
{{- end -}}

{{- define "llm42.validateModel" -}}
{{- with .Values.model -}}
{{- if and (eq .source "image") (not (hasPrefix "/" .path)) -}}
{{- fail "model.path: with model.source image it is an absolute path inside the image" -}}
{{- end -}}
{{- if and (ne .source "image") (hasPrefix "/" .path) -}}
{{- fail (printf "model.path: with model.source %s it is relative to the volume (\"\" for its root), not %s" .source .path) -}}
{{- end -}}
{{- if and (eq .source "pvc") (not .pvc.claimName) -}}
{{- fail "model.pvc.claimName: name the claim that holds the model" -}}
{{- end -}}
{{- if and (eq .source "hostPath") (not (hasPrefix "/" .hostPath.path)) -}}
{{- fail "model.hostPath.path: give the absolute directory on the nodes" -}}
{{- end -}}
{{- if eq .source "huggingface" -}}
{{- if not (regexMatch "^[^/ ]+/[^/ ]+$" .huggingface.repo) -}}
{{- fail "model.huggingface.repo: give owner/name" -}}
{{- end -}}
{{- if not (regexMatch "^[0-9a-f]{40}$" .huggingface.revision) -}}
{{- fail "model.huggingface.revision: give the commit, 40 hex digits: a branch can move between the starts of two pods, which would then serve different weights" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "llm42.validateHosts" -}}
{{- if gt .hosts 1 -}}
{{- if not .isVllm -}}
{{- fail "fastPath.hosts above 1: only vLLM spans nodes: set config.engine.kind to vllm" -}}
{{- end -}}
{{- if ne (dig "extra_args" "distributed_executor_backend" "" .vllm) "ray" -}}
{{- fail "fastPath.hosts above 1: set config.engine.vllm.extra_args.distributed_executor_backend to ray" -}}
{{- end -}}
{{- $gpus := int (mul .v.fastPath.gpu.count .hosts) -}}
{{- if ne .tp $gpus -}}
{{- fail (printf "config.engine.vllm.tensor_parallel_size is %d, but fastPath.hosts x fastPath.gpu.count is %d: make them equal" .tp $gpus) -}}
{{- end -}}
{{- if not .v.verifier.dedicated -}}
{{- fail "fastPath.hosts above 1: the verifier needs a GPU of its own: set verifier.dedicated to true" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "llm42.validateOperations" -}}
{{- $v := .Values -}}
{{- if and $v.gcsFaultTolerance.enabled (not $v.gcsFaultTolerance.redis.address) -}}
{{- fail "gcsFaultTolerance.redis.address: give host:port of an external Redis, or set gcsFaultTolerance.enabled to false" -}}
{{- end -}}
{{- if and (eq $v.upgrade.strategy "NewClusterWithIncrementalUpgrade") (not $v.upgrade.incremental.gatewayClassName) -}}
{{- fail "upgrade.incremental.gatewayClassName: the incremental strategy needs a Gateway class" -}}
{{- end -}}
{{- if and (eq $v.upgrade.strategy "NewClusterWithIncrementalUpgrade") (ne (include "llm42.scales" .) "true") -}}
{{- fail "upgrade.strategy NewClusterWithIncrementalUpgrade: KubeRay refuses it without Ray's autoscaler: enable fastPath.autoscaling (minReplicas may equal maxReplicas) or that of dedicated verifiers" -}}
{{- end -}}
{{- if gt (int $v.upgrade.incremental.stepSizePercent) (int $v.upgrade.incremental.maxSurgePercent) -}}
{{- fail "upgrade.incremental: KubeRay refuses a stepSizePercent above maxSurgePercent" -}}
{{- end -}}
{{- if and $v.verifier.ingress (not $v.verifier.dedicated) -}}
{{- fail "verifier.ingress is of dedicated verifiers: their pods have ingresses anyhow without verifier.dedicated" -}}
{{- end -}}
{{- if and (eq $v.upgrade.strategy "NewClusterWithIncrementalUpgrade") (or $v.ingress.enabled $v.httpRoute.enabled) -}}
{{- fail "upgrade.strategy NewClusterWithIncrementalUpgrade: KubeRay makes a Gateway and a route of its own: disable ingress and httpRoute" -}}
{{- end -}}
{{- $taken := dict "6379" "the head's GCS" "8080" "the metrics of Ray's agent" "8265" "Ray's dashboard" "44217" "the autoscaler's metrics" "44227" "the dashboard's metrics" "52365" "Ray's agent" -}}
{{- if $v.serve.haProxy.enabled -}}{{- $taken = merge $taken (dict "8404" "HAProxy's statistics" "9101" "HAProxy's metrics") -}}{{- end -}}
{{- with get $taken (toString (int $v.serve.port)) -}}
{{- fail (printf "serve.port: %d is the port of %s in the same pods: take another, such as 8000" (int $v.serve.port) .) -}}
{{- end -}}
{{- if and $v.serve.haProxy.enabled (not $v.networkPolicy.enabled) -}}
{{- fail "serve.haProxy.enabled opens ports 8404, 9101 and 30000-31000 on all interfaces: set networkPolicy.enabled to true with it" -}}
{{- end -}}
{{- if and $v.ingress.enabled (ne $v.ingress.path "/") (not $v.ingress.annotations) (not (regexMatch "^(/[A-Za-z0-9._~-]+)+/?$" $v.ingress.path)) -}}
{{- fail (printf "ingress.path: %s is a pattern, which an annotation of the controller must turn into the API's own paths: add it under ingress.annotations, or give a plain path such as /llm" $v.ingress.path) -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.host) -}}
{{- fail "ingress.host: give the host name" -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name the Gateway to attach to" -}}
{{- end -}}
{{- range $name, $group := dict "fastPath" $v.fastPath "verifier" $v.verifier -}}
{{- if and $group.autoscaling.enabled (gt (int $group.autoscaling.minReplicas) (int $group.autoscaling.maxReplicas)) -}}
{{- fail (printf "%s.autoscaling: minReplicas is above maxReplicas" $name) -}}
{{- end -}}
{{- end -}}
{{- range $v.networkPolicy.egress.redis -}}{{- else -}}
{{- if and $v.networkPolicy.enabled $v.networkPolicy.egress.enabled $v.gcsFaultTolerance.enabled -}}
{{- fail "networkPolicy.egress.redis: say where Redis is, or the head cannot reach it" -}}
{{- end -}}
{{- end -}}
{{- end -}}
