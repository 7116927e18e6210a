"""What a test gets of an object store server: address, credentials, fresh buckets, ready-made options."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import boto3
from botocore.config import Config

from tests.servers.child import ChildServer
from tiered.object_store.interface import S3Credentials, StoreOptions
from tiered.settings.sections import ObjectStoreSettings

REGION = "us-east-1"


@dataclass
class RunningStore:
    """A server that speaks S3. ``checks_secrets`` and ``checks_bodies``: what it verifies as AWS does."""

    name: str
    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)
    server: ChildServer
    checks_secrets: bool = True
    checks_bodies: bool = True
    _admin: Any = field(default=None, repr=False)

    def options(self, **settings: Any) -> StoreOptions:
        """Options that reach this server; keywords change settings of the object_store section."""
        base = ObjectStoreSettings(endpoint_url=self.endpoint, region=REGION)
        return StoreOptions(replace(base, **settings), S3Credentials(self.access_key, self.secret_key))

    def environment(self) -> dict[str, str]:
        """Environment variables through which a child process finds this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "TIERED_OBJECT_STORE__ENDPOINT_URL": self.endpoint,
        }

    def fresh_bucket(self) -> str:
        """A new empty bucket as ``s3://name``."""
        name = f"t-{uuid.uuid4().hex[:12]}"
        if self._admin is None:
            self._admin = self.client()
        self._admin.create_bucket(Bucket=name)
        return f"s3://{name}"

    def account(self, policy: Mapping[str, Any]) -> S3Credentials:
        """Keys of an account that may do what an IAM policy says; MinIO only."""
        sts = boto3.session.Session().client(
            "sts",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
        )
        text = json.dumps(policy, separators=(",", ":"))
        given = sts.assume_role(RoleArn="arn:minio:iam:::role/test", RoleSessionName="test", Policy=text)
        sts.close()
        keys = given["Credentials"]
        return S3Credentials(keys["AccessKeyId"], keys["SecretAccessKey"], keys["SessionToken"])

    def client(self, region: str = REGION) -> Any:
        """The SDK's own client, for looking behind the store."""
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}),
        )
