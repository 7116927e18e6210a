"""Finding single messages in an archive: by key, by unique key, by offsetMsgId."""
