#!/bin/sh
# A call of a function, for models whose chat template knows tools (Qwen2.5 does, SmolLM2 does not).
set -e
url=${OUTRIDER_URL:-http://127.0.0.1:8000}

curl -sS --fail-with-body "$url/v1/chat/completions" \
  -H "content-type: application/json" \
  -H "authorization: Bearer ${OUTRIDER_API_KEY:-any}" \
  -d '{
    "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
    "tools": [{
      "type": "function",
      "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
          "type": "object",
          "properties": {"city": {"type": "string", "maxLength": 20}},
          "required": ["city"],
          "additionalProperties": false
        }
      }
    }],
    "tool_choice": "required",
    "parallel_tool_calls": false
  }'
