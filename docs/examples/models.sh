#!/bin/sh
# The models that are served, and whether they can answer.
set -e
url=${OUTRIDER_URL:-http://127.0.0.1:8000}

curl -sS --fail-with-body "$url/ready"
curl -sS --fail-with-body "$url/v1/models"
