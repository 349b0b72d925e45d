// Settings: fields of the dialog, and what they ask for.

export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens", "seed"];
export const FIELDS = ["system", ...NUMBERS, "stop", "policy", "schema", "markdown"];
export const DEFAULTS = { max_tokens: "512", markdown: "true" };

// The fields of a request for values as they were typed; throws an Error that says which one cannot be read.
export function asked(values) {
  const body = {};
  for (const name of NUMBERS) {
    const text = (values[name] ?? "").trim();
    if (text === "") continue;
    if (!Number.isFinite(Number(text))) throw new Error(`Settings: ${name.replace("_", " ")} is not a number.`);
    body[name] = Number(text);
  }
  const stop = (values.stop ?? "").split("\n").filter((one) => one !== "");
  if (stop.length) body.stop = stop.map((one) => one.replaceAll("\\n", "\n"));
  if (values.policy) body.policy = values.policy;
  const schema = schemaOf(values.schema ?? "");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return body;
}

function schemaOf(text) {
  if (text.trim() === "") return null;
  let schema;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    throw new Error(`Settings: the JSON schema cannot be read (${error.message}).`);
  }
  if (typeof schema !== "object" || schema === null || Array.isArray(schema)) throw new Error("Settings: a JSON schema is an object.");
  return schema;
}
