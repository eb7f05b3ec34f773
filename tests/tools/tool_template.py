"""A chat template that tells of tools and shows calls as the Qwen2.5 family does."""

TOOL_TEMPLATE = """
{%- if tools %}<tools>
{%- for tool in tools %}{{ tool.function.name }}:{{ tool.function.parameters | tojson }};{% endfor -%}
</tools> within <tool_call></tool_call>
{% endif %}
{%- for message in messages %}
    {{- '<' + message.role + '>' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""
