#!/bin/sh
# The same as it is written, with the figures in the end. `speculation` is auto, on or off.
set -e
url=${OUTRIDER_URL:-http://127.0.0.1:8000}

curl -sS --fail-with-body --no-buffer "$url/v1/chat/completions" \
  -H "content-type: application/json" \
  -H "authorization: Bearer ${OUTRIDER_API_KEY:-any}" \
  -d '{
    "messages": [{"role": "user", "content": "Write a haiku about horses."}],
    "max_tokens": 40,
    "seed": 7,
    "stream": true,
    "stream_options": {"include_usage": true},
    "speculation": "on",
    "draft_length": 4
  }'
