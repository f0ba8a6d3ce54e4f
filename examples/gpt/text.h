// The text to learn from: any files, as bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace ballast::gpt {

// Names the sequences of a draw: the same key always draws the same ones, also after a restart.
struct Draw {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::uint64_t micro_step = 0;
  std::uint64_t rank = 0;
};

class Text {
 public:
  explicit Text(
      const std::vector<std::filesystem::path>& files);  // one after the other; without files: made-up sentences

  std::size_t bytes() const { return bytes_.size(); }

  // Returns `count` sequences of `length` bytes from random places of the text.
  std::vector<std::uint8_t> draw(const Draw& which, std::size_t count, std::size_t length) const;

 private:
  std::vector<std::uint8_t> bytes_;
};

}  // namespace ballast::gpt
