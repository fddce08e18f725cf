// The gateway's API, as the page uses it.

const PROGRESS_MS = 500;

// What went wrong, in words for people; `status` is 0 if there was no answer.
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

// Returns the models that are served, each with its `id`, and details in `specd`. Throws ApiError.
export async function servedModels(token) {
  const response = await send("/v1/models", { headers: headersFor(token) });
  return (await response.json()).data;
}

// Waits until a model is loaded, which this begins. `say` is called with the stage of its start. Throws ApiError.
export async function loadModel(id, token, signal, say) {
  const ask = async () => {
    const model = (await servedModels(token).catch(() => [])).find((each) => each.id === id);
    if (model && timer !== null) say(model.status?.stage ?? "");
  };
  let timer = setInterval(ask, PROGRESS_MS);
  try {
    await post("/tokenize", { model: id, content: "" }, token, signal);
  } finally {
    clearInterval(timer);
    timer = null;
  }
}

// Yields the chunks of a streamed answer. Throws ApiError, also for a stream that ends too soon; `signal` aborts it.
// `say` is called with what the stream waits for.
export async function* chunksOf(path, body, token, signal, say) {
  const response = await post(path, body, token, signal);
  for await (const line of linesOf(response.body, signal)) {
    if (line.startsWith(": ") && line !== ": ping") say(line.slice(2));
    if (!line.startsWith("data: ")) continue; // a comment, or the empty line after an event
    if (line === "data: [DONE]") return;
    const chunk = JSON.parse(line.slice(6));
    if (chunk.error) throw new ApiError(chunk.error.message);
    yield chunk;
  }
  throw new ApiError("the answer ended too soon: the gateway may have been stopped");
}

function post(path, body, token, signal) {
  const headers = { ...headersFor(token), "content-type": "application/json" };
  return send(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw failure(error, options.signal);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const seconds = response.headers.get("retry-after");
  const again = seconds ? ` (try again in ${seconds} s)` : "";
  throw new ApiError((body?.error?.message ?? `the gateway answers ${response.status}`) + again, response.status);
}

async function* linesOf(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      yield* lines;
    }
  } catch (error) {
    throw failure(error, signal);
  } finally {
    reader.cancel().catch(() => {});
  }
}

function failure(error, signal) {
  return signal?.aborted ? error : new ApiError("the gateway does not answer: is it still running?");
}

function headersFor(token) {
  return token ? { authorization: `Bearer ${token}` } : {};
}
