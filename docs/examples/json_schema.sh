#!/bin/sh
# An answer that is JSON of a schema.
set -e
url=${OUTRIDER_URL:-http://127.0.0.1:8000}

curl -sS --fail-with-body "$url/v1/chat/completions" \
  -H "content-type: application/json" \
  -H "authorization: Bearer ${OUTRIDER_API_KEY:-any}" \
  -d '{
    "messages": [{"role": "user", "content": "A horse, as JSON with name and age."}],
    "response_format": {
      "type": "json_schema",
      "json_schema": {
        "name": "horse",
        "strict": true,
        "schema": {
          "type": "object",
          "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 40}
          },
          "required": ["name", "age"],
          "additionalProperties": false
        }
      }
    }
  }'
