// The secret of a job. Processes prove to each other that they know it, without sending it.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace ballast {

inline constexpr std::size_t proof_bytes = 32;

std::string random_bytes(std::size_t count);  // that no other process can predict
std::string random_secret();                  // 256 random bits, in letters and digits

// Any thread may call.
class Secret {
 public:
  // Without words, every process knows the secret: it proves nothing.
  explicit Secret(std::string_view words = {});

  bool is_known_to_all() const { return is_known_to_all_; }
  std::string proof(std::string_view statement) const;  // proof_bytes of a keyed hash of the statement
  // Takes the same time for every wrong proof.
  bool proves(std::string_view proof, std::string_view statement) const;

 private:
  bool is_known_to_all_;
  std::array<unsigned char, 32> key_{};
};

}  // namespace ballast
