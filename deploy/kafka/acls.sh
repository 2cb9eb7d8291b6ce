#!/bin/sh
# Gives each role of fairpost the rights in Kafka that it needs, and no others (README.md says why each).
#
#   acls.sh BOOTSTRAP_SERVERS ADMIN_PROPERTIES [TOPIC_PREFIX]
#
# Needs Kafka's kafka-acls.sh on PATH, and an authorizer in the brokers that refuses what is not allowed
# (org.apache.kafka.metadata.authorizer.StandardAuthorizer). Run again it changes nothing.
set -eu

servers=${1:?BOOTSTRAP_SERVERS}
admin=${2:?ADMIN_PROPERTIES}
p=${3-}

allow() {
  user=$1
  shift
  kafka-acls.sh --bootstrap-server "$servers" --command-config "$admin" --add --allow-principal "User:$user" "$@"
}

# fairpost worker
allow fairpost-worker --operation Read --topic "${p}campaigns" --topic "${p}due-emails" --topic "${p}send-emails"
allow fairpost-worker --operation Write --topic "${p}send-emails" --topic "${p}dead-letters"
allow fairpost-worker --operation Describe --topic "${p}delivery-log"
allow fairpost-worker --operation Read --group "${p}fairpost-worker"

# fairpost tracker
for topic in campaigns due-emails send-emails delivery-log; do
  allow fairpost-tracker --operation Read --operation DescribeConfigs --topic "$p$topic"
done
allow fairpost-tracker --operation Write --topic "${p}delivery-status" --topic "${p}dead-letters"
allow fairpost-tracker --operation Read --group "${p}fairpost-tracker"
allow fairpost-tracker --operation Describe --group "${p}fairpost-worker"

# Fluentd on a mail host
allow fairpost-fluentd --operation Write --topic "${p}delivery-log"

# A service that publishes campaigns and due e-mails, and one that reads what became of them, in a group of its name
allow fairpost-producer --operation Write --topic "${p}campaigns" --topic "${p}due-emails"
allow fairpost-consumer --operation Read --topic "${p}delivery-status"
allow fairpost-consumer --operation Read --group fairpost-consumer

# People: fairpost topics, publish, dead-letters, status
for topic in campaigns due-emails send-emails delivery-log delivery-status dead-letters; do
  allow fairpost-people --operation Create --operation Describe --operation DescribeConfigs --topic "$p$topic"
done
allow fairpost-people --operation Write --topic "${p}campaigns" --topic "${p}due-emails" --topic "${p}send-emails" \
  --topic "${p}delivery-log"
allow fairpost-people --operation Read --topic "${p}campaigns" --topic "${p}due-emails" --topic "${p}send-emails" \
  --topic "${p}delivery-log" --topic "${p}dead-letters"
allow fairpost-people --operation Describe --group "${p}fairpost-worker" --group "${p}fairpost-tracker"
