#include "zero/comm/secret.h"

#include <ballast/error.h>

#include <sodium.h>

namespace ballast {
namespace {

static_assert(proof_bytes == crypto_auth_BYTES);

// Any thread may call it, any number of times.
void begin_sodium() {
  require(::sodium_init() >= 0, Code::internal, [] { return Problem{.what = "cannot start libsodium"}; });
}

const unsigned char* octets_of(std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); }

}  // namespace

std::string random_bytes(std::size_t count) {
  begin_sodium();
  std::string bytes(count, '\0');
  ::randombytes_buf(bytes.data(), bytes.size());
  return bytes;
}

std::string random_secret() {
  const std::string bytes = random_bytes(32);
  std::string letters(2 * bytes.size() + 1, '\0');
  ::sodium_bin2hex(letters.data(), letters.size(), octets_of(bytes), bytes.size());
  letters.pop_back();
  return letters;
}

Secret::Secret(std::string_view words) : is_known_to_all_(words.empty()) {
  static_assert(sizeof key_ == crypto_auth_KEYBYTES);
  begin_sodium();
  ::crypto_generichash(key_.data(), key_.size(), octets_of(words), words.size(), nullptr, 0);
}

std::string Secret::proof(std::string_view statement) const {
  std::string proof(proof_bytes, '\0');
  ::crypto_auth(reinterpret_cast<unsigned char*>(proof.data()), octets_of(statement), statement.size(), key_.data());
  return proof;
}

bool Secret::proves(std::string_view proof, std::string_view statement) const {
  return proof.size() == proof_bytes &&
         ::crypto_auth_verify(octets_of(proof), octets_of(statement), statement.size(), key_.data()) == 0;
}

}  // namespace ballast
