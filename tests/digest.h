// A digest of results, for tests that compare them with recorded ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ballast::testing {

// FNV-1a of all results that are added.
class Digest {
 public:
  void add(std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes) {
      value_ = (value_ ^ std::to_integer<std::uint64_t>(byte)) * 0x100000001b3u;
    }
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace ballast::testing
