{{- define "kvbm.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvbm.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains (include "kvbm.name" .) .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvbm.name" .) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvbm.selector" -}}
app.kubernetes.io/name: {{ include "kvbm.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvbm.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/component: manager
{{ include "kvbm.selector" . }}
{{- end -}}

{{- define "kvbm.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvbm.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvbm.socket" -}}
{{ .Values.socket.hostPath }}/manager.sock
{{- end -}}

{{- define "kvbm.diskMount" -}}
/var/lib/kvbm
{{- end -}}

{{- define "kvbm.certsMount" -}}
/etc/kvbm-fleet
{{- end -}}

{{- define "kvbm.keysMount" -}}
/etc/kvbm-keys
{{- end -}}

{{- define "kvbm.remoteMount" -}}
/mnt/kvbm
{{- end -}}

{{- define "kvbm.hasRemoteDirectory" -}}
{{- with .Values.remote.directory -}}
{{- if and .existingClaim .hostPath -}}
{{- fail "remote.directory.existingClaim and remote.directory.hostPath cannot be used together: name one" -}}
{{- end -}}
{{- if or .existingClaim .hostPath -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{- /* What only the pod knows: its address, in brackets, as an IPv6 one must be and an IPv4 one may be, and its node. */ -}}
{{- define "kvbm.fleetEnv" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: DYN_KVBM_FLEET_LISTEN
  value: "[$(POD_IP)]:{{ .Values.fleet.port }}"
- name: DYN_KVBM_FLEET_NODE
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- end -}}

{{- define "kvbm.env" -}}
{{- if .Values.fleet.enabled -}}
{{- range .Values.extraEnv -}}
{{- if has .name (list "POD_IP" "DYN_KVBM_FLEET_LISTEN" "DYN_KVBM_FLEET_NODE") -}}
{{- fail (printf "extraEnv %s cannot be used: fleet.enabled says it" .name) -}}
{{- end -}}
{{- end -}}
{{ include "kvbm.fleetEnv" . }}
{{ end -}}
{{- with .Values.extraEnv -}}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{- define "kvbm.fleetSettings" -}}
{{- with .Values.fleet -}}
{{- if and .etcd .peers -}}
{{- fail "fleet.etcd and fleet.peers cannot be used together: name one" -}}
{{- end -}}
{{- if not (or .etcd .peers) -}}
{{- fail "fleet.enabled needs fleet.etcd, or fleet.peers: who else is there" -}}
{{- end -}}
{{- if eq (int .port) (int $.Values.metrics.port) -}}
{{- fail (printf "fleet.port=%d cannot be used: it is metrics.port" (int .port)) -}}
{{- end -}}
fleet: {{ .name | quote }}
{{- with .etcd }}
fleet_etcd: {{ join "," . | quote }}
{{- end }}
{{- with .peers }}
fleet_peers: {{ join "," . | quote }}
{{- end }}
{{- if .certsSecret }}
fleet_certs: {{ include "kvbm.certsMount" $ | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{- /* What other values of the chart say, by the names of the settings file. */ -}}
{{- define "kvbm.ownSettings" -}}
manager: {{ include "kvbm.socket" . | quote }}
runtime_dir: {{ .Values.socket.hostPath | quote }}
host_bytes: {{ printf "%vGB" .Values.hostMemoryGB | quote }}
disk_bytes: {{ printf "%vGB" .Values.disk.sizeGB | quote }}
{{- if .Values.disk.sizeGB }}
disk_dir: {{ include "kvbm.diskMount" . | quote }}
{{- end }}
metrics: true
metrics_port: {{ .Values.metrics.port }}
{{- if .Values.fleet.enabled }}
{{ include "kvbm.fleetSettings" . }}
{{- end }}
{{- if include "kvbm.hasRemoteDirectory" . }}
remote: {{ printf "file://%s" (include "kvbm.remoteMount" .) | quote }}
{{- end }}
{{- if .Values.remote.keys.secret }}
remote_key_file: {{ printf "%s/%s" (include "kvbm.keysMount" .) .Values.remote.keys.file | quote }}
{{- end }}
{{- end -}}

{{- /* The settings file. Text of JSON is text of TOML; numbers come as floats, and whole ones are written as such. */ -}}
{{- define "kvbm.toml" -}}
{{- $own := include "kvbm.ownSettings" . | fromYaml -}}
{{- $more := list "disk_dir" "host_blocks" "disk_blocks" -}}
{{- if .Values.fleet.enabled -}}
{{- $more = concat $more (list "fleet_listen" "fleet_node" "fleet_etcd" "fleet_peers") -}}
{{- end -}}
{{- range $name := keys .Values.settings | sortAlpha -}}
{{- if or (hasKey $own $name) (has $name $more) -}}
{{- fail (printf "settings.%s cannot be used: other values of this chart say it" $name) -}}
{{- end -}}
{{- end -}}
{{- $all := merge (deepCopy .Values.settings) $own -}}
{{- range $name := keys $all | sortAlpha -}}
{{- $value := get $all $name -}}
{{ $name }} = {{ if or (kindIs "string" $value) (kindIs "bool" $value) }}{{ $value | toJson }}{{ else if eq (floor $value) (float64 $value) }}{{ $value | int64 }}{{ else }}{{ $value }}{{ end }}
{{ end -}}
{{- end -}}

{{- /* The most that a stop takes: readers on other nodes and leaders of other nodes are sent away within 0.4 s each, and the tiers of all namespaces are closed within 4 s. */ -}}
{{- define "kvbm.drainSeconds" -}}
{{- 5 -}}
{{- end -}}

{{- define "kvbm.graceSeconds" -}}
{{- $drain := include "kvbm.drainSeconds" . | int -}}
{{- $asked := int .Values.terminationGracePeriodSeconds -}}
{{- if and $asked (le $asked $drain) -}}
{{- fail (printf "terminationGracePeriodSeconds=%d cannot be used: more than the %d that a stop may take" $asked $drain) -}}
{{- end -}}
{{- default (add $drain 10) $asked -}}
{{- end -}}

{{- /* Host memory is charged to whoever touches it first, mostly the manager. Without any, blocks pass through staging. */ -}}
{{- define "kvbm.memory" -}}
{{- $passing := ternary 0.6 0.0 (eq (float64 .Values.hostMemoryGB) 0.0) -}}
{{- default (printf "%dM" (int64 (ceil (mulf 1000 (addf .Values.hostMemoryGB .Values.overheadGB $passing))))) .Values.resources.memory -}}
{{- end -}}

{{- /* Engines hold the memory of a manager that crashed until they have the next one's, and the pod answers for both. */ -}}
{{- define "kvbm.memoryLimit" -}}
{{- $held := ternary 0.6 (float64 .Values.hostMemoryGB) (eq (float64 .Values.hostMemoryGB) 0.0) -}}
{{- default (printf "%dM" (int64 (ceil (mulf 1000 (addf (mulf 2 $held) .Values.overheadGB))))) .Values.resources.memoryLimit -}}
{{- end -}}
