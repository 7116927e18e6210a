{{/* Parts of several pods. "rocketmq-tiered.sidecar" and "rocketmq-tiered.volumes" are also for other charts. */}}

{{- define "rocketmq-tiered.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "rocketmq-tiered.labels" -}}
app.kubernetes.io/name: rocketmq-tiered
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "rocketmq-tiered.image" -}}
{{- with .Values.image }}{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}{{ end }}
{{- end }}

{{- define "rocketmq-tiered.podSecurity" -}}
runAsNonRoot: true
runAsUser: 3000
runAsGroup: 3000
fsGroup: 3000
# Always would make private directories writable for the group, and they would be refused.
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "rocketmq-tiered.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* environment: of one role. root, account, environment (map), file (whether settings are mounted) */}}
{{- define "rocketmq-tiered.environment" -}}
- {name: TIERED_ARCHIVE__URL, value: {{ .root.Values.archive.url | quote }}}
{{- with .root.Values.archive.region }}
- {name: AWS_REGION, value: {{ . | quote }}}
{{- end }}
{{- with .root.Values.archive.endpointUrl }}
- {name: TIERED_OBJECT_STORE__ENDPOINT_URL, value: {{ . | quote }}}
{{- end }}
{{- if .root.Values.archive.trustedNetwork }}
- {name: TIERED_OBJECT_STORE__TRUSTED_NETWORK, value: "true"}
{{- end }}
{{- if .root.Values.settings }}
- {name: TIERED_CONFIG, value: /etc/rocketmq-tiered/tiered.toml}
{{- end }}
- {name: TIERED_ADMIN__HOST, value: "0.0.0.0"}
- {name: TIERED_ADMIN__PORT, value: {{ .root.Values.admin.port | quote }}}
{{- range $name, $value := .environment }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- with .account.secret }}
- name: AWS_ACCESS_KEY_ID
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: AWS_ACCESS_KEY_ID}}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: AWS_SECRET_ACCESS_KEY}}
{{- end }}
{{- end }}

{{- define "rocketmq-tiered.settingsMount" -}}
{{- if .Values.settings }}
- {name: tiered-settings, mountPath: /etc/rocketmq-tiered, readOnly: true}
{{- end }}
{{- end }}

{{- define "rocketmq-tiered.settingsVolume" -}}
{{- if .Values.settings }}
- name: tiered-settings
  configMap: {name: {{ include "rocketmq-tiered.fullname" . }}-settings}
{{- end }}
{{- end }}

{{/* Health: the process works. Ready: it archives, or owns the groups. A first start may compile kernels. */}}
{{- define "rocketmq-tiered.probes" -}}
startupProbe:
  httpGet: {path: /health, port: admin}
  periodSeconds: 2
  failureThreshold: 90
livenessProbe:
  httpGet: {path: /health, port: admin}
  periodSeconds: 10
  failureThreshold: 6
{{- end }}

{{/* The sidecar's container. root; store: name of the volume with the broker's store; storePath: where the broker
     mounts it; conf: name of the volume with broker.conf; address: the broker's, if not 127.0.0.1:10911 */}}
{{- define "rocketmq-tiered.sidecar" -}}
- name: tiered
  image: {{ include "rocketmq-tiered.image" .root | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: [run]
  env:
    - {name: TIERED_BROKER__CONF_PATH, value: /etc/rocketmq/broker.conf}
    - {name: TIERED_BROKER__ADDRESS, value: {{ .address | default "127.0.0.1:10911" | quote }}}
    {{- include "rocketmq-tiered.environment" (dict "root" .root "account" .root.Values.accounts.sidecar "environment" .root.Values.sidecar.environment) | nindent 4 }}
  ports: [{name: admin, containerPort: {{ .root.Values.admin.port }}}]
  {{- include "rocketmq-tiered.probes" .root | nindent 2 }}
  # No readiness probe: the broker takes messages whether or not they are archived. Alerts say when they are not.
  resources: {{ toYaml .root.Values.sidecar.resources | nindent 4 }}
  securityContext: {{ include "rocketmq-tiered.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    - {name: {{ .store }}, mountPath: {{ .storePath }}}
    - {name: {{ .conf }}, mountPath: /etc/rocketmq, readOnly: true}
    - {name: tiered-state, mountPath: /var/lib/rocketmq-tiered}
    - {name: tiered-tmp, mountPath: /tmp}
    {{- include "rocketmq-tiered.settingsMount" .root | nindent 4 }}
{{- end }}

{{/* Volumes of the sidecar but for its state, which is a volume claim named tiered-state. */}}
{{- define "rocketmq-tiered.volumes" -}}
- name: tiered-tmp
  emptyDir: {medium: Memory, sizeLimit: 64Mi}
{{- include "rocketmq-tiered.settingsVolume" . | nindent 0 }}
{{- end }}

{{- define "rocketmq-tiered.scraped" -}}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .Values.admin.port | quote }}
prometheus.io/path: /metrics
{{- end }}
