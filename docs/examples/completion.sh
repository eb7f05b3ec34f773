#!/bin/sh
# Three continuations of a text, with log probabilities.
set -e
url=${OUTRIDER_URL:-http://127.0.0.1:8000}

curl -sS --fail-with-body "$url/v1/completions" \
  -H "content-type: application/json" \
  -H "authorization: Bearer ${OUTRIDER_API_KEY:-any}" \
  -d '{
    "prompt": "The outrider left the camp before dawn and",
    "n": 3,
    "max_tokens": 20,
    "logprobs": 2,
    "stop": ["."],
    "top_k": 40
  }'
