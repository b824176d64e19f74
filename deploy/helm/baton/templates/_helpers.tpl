{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "baton.claim" -}}
{{ .Values.models.existingClaim | default (printf "%s-models" .Release.Name) }}
{{- end }}

{{/* The settings of every process, as a mapping. */}}
{{- define "baton.settings" -}}
{{- $runtime := dict "discovery" .Values.discovery -}}
{{- if eq .Values.discovery "etcd" -}}
{{- $_ := set $runtime "etcd" (printf "http://%s-etcd:2379" .Release.Name) -}}
{{- end -}}
{{- if .Values.tls.existingSecret -}}
{{- $_ := set $runtime "tls_ca" "/etc/baton/tls/ca.crt" -}}
{{- $_ := set $runtime "tls_certificate" "/etc/baton/tls/tls.crt" -}}
{{- $_ := set $runtime "tls_key" "/etc/baton/tls/tls.key" -}}
{{- end -}}
{{- $own := dict
  "runtime" $runtime
  "host" "0.0.0.0" "port" 8000
  "system_host" "0.0.0.0" "system_port" 9090
  "control_token_file" "/etc/baton/secrets/control-token"
  "api_key_file" "/etc/baton/secrets/api-keys"
  "cache_dir" "/models"
  "kv" (dict "port" 9100) -}}
{{ toYaml (mergeOverwrite $own (deepCopy .Values.settings)) }}
{{- end }}

{{/* What every pod of Baton has, besides its container's own fields. */}}
{{- define "baton.pod" -}}
serviceAccountName: {{ .Release.Name }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- end }}

{{- define "baton.env" -}}
- {name: HF_HOME, value: /models/huggingface}
{{- if eq .Values.discovery "kubernetes" }}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
- {name: POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
{{- end }}
{{- end }}

{{/* Probes of a process at the named port: /live also answers while a model loads. */}}
{{- define "baton.probes" -}}
startupProbe: {httpGet: {path: /live, port: {{ . }}}, failureThreshold: 60, periodSeconds: 2}
livenessProbe: {httpGet: {path: /live, port: {{ . }}}, failureThreshold: 3, periodSeconds: 10, timeoutSeconds: 5}
readinessProbe: {httpGet: {path: /health, port: {{ . }}}, periodSeconds: 5, timeoutSeconds: 5}
{{- end }}

{{- define "baton.mounts" -}}
- {name: settings, mountPath: /etc/baton/settings, readOnly: true}
- {name: secrets, mountPath: /etc/baton/secrets, readOnly: true}
- {name: home, mountPath: /home/baton}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/baton/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "baton.volumes" -}}
- {name: settings, configMap: {name: {{ .Release.Name }}-settings}}
- {name: secrets, secret: {secretName: {{ .Values.existingSecret }}, defaultMode: 0440}}
- {name: tmp, emptyDir: {sizeLimit: 8Gi}}
{{- with .Values.tls.existingSecret }}
- {name: tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}
