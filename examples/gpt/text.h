// What a model learns from: any files, as bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace ballast::gpt {

// Which sequences: the same ones are drawn for it always, also after a restart.
struct Draw {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::uint64_t micro_step = 0;
  std::uint64_t rank = 0;
};

class Text {
 public:
  explicit Text(const std::vector<std::filesystem::path>& files);  // one after the other; none: made-up sentences

  std::size_t bytes() const { return bytes_.size(); }

  // `count` sequences of `length` bytes from anywhere in the text.
  std::vector<std::uint8_t> draw(const Draw& which, std::size_t count, std::size_t length) const;

 private:
  std::vector<std::uint8_t> bytes_;
};

}  // namespace ballast::gpt
