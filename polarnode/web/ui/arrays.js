/** Arrays of the API (`arrays=base64`) as typed arrays: no object for a token. Pure. */

/** @param {string} text */
function bytesOf(text) {
  const binary = atob(text);
  const found = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at += 1) found[at] = binary.charCodeAt(at);
  return found;
}

/** @param {string} text little-endian int32 @returns {Int32Array} */
export function ints(text) {
  return new Int32Array(bytesOf(text).buffer);
}

/** @param {string} text little-endian float32 @returns {Float32Array} */
export function floats(text) {
  return new Float32Array(bytesOf(text).buffer);
}

/** @param {string} text uint8 @returns {Uint8Array} */
export function mask(text) {
  return bytesOf(text);
}
