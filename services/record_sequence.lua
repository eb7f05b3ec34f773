-- Writes the state of one sequence unless a newer one is held: compare-and-set on (epoch, length).
-- KEYS: record (hash), token log (string, 4 bytes a token, little-endian), events (stream).
-- ARGV: epoch number, epoch owner, committed length, tokens before the tail, tail, expiry in ms, events kept, event,
--       then the other fields of the record as name, value, ...; those that are held as they are may be left out.
-- Returns 'written'; 'refused' if a newer state is held; 'missing' if there is no record, or no log, to add to.
local held = redis.call('HMGET', KEYS[1], 'epoch_number', 'epoch_owner', 'committed_length')
if held[1] then
  local number, held_number = tonumber(ARGV[1]), tonumber(held[1])
  if number < held_number then return 'refused' end
  if number == held_number and (ARGV[2] ~= held[2] or tonumber(ARGV[3]) < tonumber(held[3])) then return 'refused' end
end

local base = tonumber(ARGV[4]) * 4
local length = redis.call('STRLEN', KEYS[2])
if length < base or (base > 0 and not held[1]) then return 'missing' end
if length == base then
  if #ARGV[5] > 0 then redis.call('APPEND', KEYS[2], ARGV[5]) end
else
  local head = ''
  if base > 0 then head = redis.call('GETRANGE', KEYS[2], 0, base - 1) end
  redis.call('SET', KEYS[2], head .. ARGV[5])
end

redis.call('HSET', KEYS[1], 'epoch_number', ARGV[1], 'epoch_owner', ARGV[2], 'committed_length', ARGV[3],
  unpack(ARGV, 9))
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[7], '*', 'event', ARGV[8], 'epoch_number', ARGV[1],
  'epoch_owner', ARGV[2], 'committed_length', ARGV[3])
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[6]) end
return 'written'
