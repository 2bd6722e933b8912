{{/* What the two kinds of monitors have in common: endpoints, one a port. Arguments: root, values (of the monitor). */}}
{{- define "llm42.endpoints" -}}
{{- range (include "llm42.metricsPorts" .root | fromYamlArray) }}
- port: {{ .name }}
  interval: {{ $.values.interval }}
  {{- with $.values.scrapeTimeout }}
  scrapeTimeout: {{ . }}
  {{- end }}
  relabelings:
    # Ray's own dashboards filter by this label.
    - sourceLabels: [__meta_kubernetes_pod_label_ray_io_cluster]
      targetLabel: ray_io_cluster
    # The rules and the dashboard keep releases apart by this one and by `namespace`.
    - sourceLabels: [__meta_kubernetes_pod_label_app_kubernetes_io_instance]
      targetLabel: release
    - sourceLabels: [__meta_kubernetes_pod_label_app_kubernetes_io_component]
      targetLabel: component
    {{- with $.values.relabelings }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with $.values.metricRelabelings }}
  metricRelabelings:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Names and numbers of the ports that pods show metrics on: Ray's agent on all, the rest where they are. */}}
{{- define "llm42.metricsPorts" -}}
- {name: metrics, port: 8080}
- {name: as-metrics, port: 44217}
- {name: dash-metrics, port: 44227}
{{- if .Values.serve.haProxy.enabled }}
- {name: proxy-metrics, port: 9101}
{{- end }}
{{- end -}}
