#!/bin/sh
# Usage: accounts.sh ENDPOINT SECRETS_DIRECTORY POLICIES_DIRECTORY
# Creates the sandbox's bucket, and for sidecar and gc an account with its policy. May run again.
set -eu
endpoint=$1 secrets=$2 policies=$3

printf '%s\n%s\n' "$(cat "$secrets/minio_user")" "$(cat "$secrets/minio_password")" | mc alias set store "$endpoint" >/dev/null
mc mb --ignore-existing store/rocketmq-tiered
for role in sidecar gc; do
    while read -r name _ value; do
        case $name in
            aws_access_key_id) key=$value ;;
            aws_secret_access_key) secret=$value ;;
        esac
    done <"$secrets/$role"
    mc admin policy create store "$role" "$policies/$role.json"
    printf '%s\n%s\n' "$key" "$secret" | mc admin user add store >/dev/null
    # Some versions refuse to attach what is attached.
    mc admin policy attach store "$role" --user "$key" ||
        case $(mc admin user info store "$key") in *"PolicyName: $role"*) ;; *) exit 1 ;; esac
done
