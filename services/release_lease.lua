-- Removes a lease unless another process has taken its name since.
-- KEYS: lease (JSON). ARGV: the holder's token. Returns 1 if it was removed.
local held = redis.call('GET', KEYS[1])
if held and cjson.decode(held)['token'] == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
