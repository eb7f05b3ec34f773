# Tells Redis when its certificate was renewed: it reads the files again when they are set again.
seen=
while true; do
  now=$(cat /etc/redis/tls/tls.crt /etc/redis/tls/tls.key /etc/redis/tls/ca.crt | sha256sum)
  if [ -n "$seen" ] && [ "$now" != "$seen" ]; then
    answer=$(redis-cli -s /data/redis.sock --user reload --no-auth-warning config set \
      tls-cert-file /etc/redis/tls/tls.crt tls-key-file /etc/redis/tls/tls.key tls-ca-cert-file /etc/redis/tls/ca.crt)
    echo "the certificate was renewed: $answer"
    [ "$answer" = OK ] || now=$seen
  fi
  seen=$now
  touch /data/reload
  sleep 5
done
