// Files of tokens, and the sequences that a micro-step draws from them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace ballast::llama {

// Tokens of files, one file after the other. A file that ends in .bin has them as nanoGPT writes them (uint16, without a header), or
// as llm.c and llmq do, whose headers say how wide they are. Any other file is text, whose bytes are the tokens.
class TokenFiles {
 public:
  explicit TokenFiles(const std::vector<std::filesystem::path>& paths);

  std::size_t size() const { return files_.empty() ? 0 : files_.back().first + files_.back().count; }
  std::vector<std::uint32_t> read(std::size_t first, std::size_t count) const;

  // Returns sequences of `length` tokens from random places, one after the other; the same key gives the same ones.
  std::vector<std::uint32_t> draw(std::uint64_t key, std::size_t sequences, std::size_t length) const;

 private:
  struct File {
    std::filesystem::path path;
    std::size_t first_byte = 0;
    std::size_t width = 1;  // bytes of a token
    std::size_t count = 0;
    std::size_t first = 0;  // the number of its first token among those of all files
  };
  static File open(const std::filesystem::path& path);

  std::vector<File> files_{};
};

}  // namespace ballast::llama
