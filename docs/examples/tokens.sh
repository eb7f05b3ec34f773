#!/bin/sh
# A text as token ids, and back.
set -e
url=${OUTRIDER_URL:-http://127.0.0.1:8000}

curl -sS --fail-with-body "$url/tokenize" \
  -H "content-type: application/json" \
  -H "authorization: Bearer ${OUTRIDER_API_KEY:-any}" \
  -d '{"prompt": "Hello", "return_token_strs": true}'
curl -sS --fail-with-body "$url/detokenize" \
  -H "content-type: application/json" \
  -H "authorization: Bearer ${OUTRIDER_API_KEY:-any}" \
  -d '{"tokens": [1, 2, 3]}'
