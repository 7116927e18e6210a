"""Access control: signatures, ACL 1.0 and 5.x rules from a file, and the audit log. Decisions are pure."""
