"""Runs inside LocalStack once it is ready: the bucket, and a rule that removes multipart leftovers."""

import boto3

from localstack import config

BUCKET = "rocketmq-tiered"

s3 = boto3.client(
    "s3",
    endpoint_url=config.internal_service_url(),
    region_name="us-east-1",
    aws_access_key_id="test",
    aws_secret_access_key="test",
)
if BUCKET not in {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}:
    s3.create_bucket(Bucket=BUCKET)
s3.put_bucket_lifecycle_configuration(
    Bucket=BUCKET,
    LifecycleConfiguration={
        "Rules": [
            {
                "ID": "abort-stale-multipart-uploads",
                "Status": "Enabled",
                "Filter": {"Prefix": ""},
                "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
            }
        ]
    },
)
