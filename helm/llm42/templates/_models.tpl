{{/*
Several models in one release: every object is rendered once an entry of `models`, as a release named <release>-<entry> would
render it with the entry's values over the others. So names, selectors, metrics' label `release` and rules are each model's own.
Without entries a template is rendered as it is.
*/}}
{{- define "llm42.each" -}}
{{- $root := .root -}}
{{- if not $root.Values.models -}}
{{- include "llm42.layout" $root.Values -}}
{{- include .template $root -}}
{{- else -}}
{{- include "llm42.validateModels" $root -}}
{{- range $name, $own := $root.Values.models -}}
{{- $values := mustMergeOverwrite (deepCopy (omit $root.Values "models")) (deepCopy $own) -}}
{{- include "llm42.layout" $values -}}
{{- $release := merge (dict "Name" (printf "%s-%s" $root.Release.Name $name)) $root.Release -}}
{{- $all := dict "Values" $values "Release" $release "Chart" $root.Chart "Files" $root.Files "Capabilities" $root.Capabilities "Template" $root.Template -}}
{{- with include $.template $all | trim }}
{{ default "---" $.between }}
{{ . }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuses entries that would share what only one can have. */}}
{{- define "llm42.validateModels" -}}
{{- if .Values.fullnameOverride -}}
{{- fail "models: fullnameOverride would give all of them one name: set it in each entry, or use nameOverride" -}}
{{- end -}}
{{- if and .Values.serviceAccount.create .Values.serviceAccount.name -}}
{{- fail "models: serviceAccount.name would be made once a model: set serviceAccount.create to false and name one that exists, or leave the name empty" -}}
{{- end -}}
{{- $seen := dict -}}
{{- range $name, $own := .Values.models -}}
{{- $v := mustMergeOverwrite (deepCopy (omit $.Values "models")) (deepCopy $own) -}}
{{- if hasKey $own "models" -}}
{{- fail (printf "models.%s.models: an entry has no models of its own" $name) -}}
{{- end -}}
{{- if hasKey $own "dashboard" -}}
{{- fail (printf "models.%s.dashboard: one dashboard shows all: set dashboard beside models" $name) -}}
{{- end -}}
{{- $taken := list (printf "the name %s" (include "llm42.fullname" (dict "Values" $v "Chart" $.Chart "Release" (dict "Name" (printf "%s-%s" $.Release.Name $name))))) -}}
{{- if $v.ingress.enabled -}}{{- $taken = append $taken (printf "the address %s%s (ingress)" $v.ingress.host $v.ingress.path) -}}{{- end -}}
{{- if $v.httpRoute.enabled -}}
{{- range default (list "*") $v.httpRoute.hostnames -}}{{- $taken = append $taken (printf "the address %s (httpRoute.hostnames)" .) -}}{{- end -}}
{{- end -}}
{{- range $taken -}}
{{- if hasKey $seen . -}}
{{- fail (printf "models.%s and models.%s have %s both: set another in one of them" (get $seen .) $name .) -}}
{{- end -}}
{{- $_ := set $seen . $name -}}
{{- end -}}
{{- end -}}
{{- end -}}
