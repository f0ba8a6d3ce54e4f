// Files of tokens, and the sequences that a micro-step draws from them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

namespace ballast::llama {

// Tokens of files, one file after the other. A file that ends in .bin has them as nanoGPT writes them (uint16, without a header), or
// as llm.c and llmq do, whose headers say how wide they are. Any other file is text, whose bytes are the tokens. The files are mapped.
class TokenFiles {
 public:
  explicit TokenFiles(const std::vector<std::filesystem::path>& paths);

  std::size_t size() const { return first_.back(); }
  std::vector<std::uint32_t> read(std::size_t first, std::size_t count) const;

  // Returns sequences of `length` tokens from random places, one after the other; the same key gives the same ones.
  std::vector<std::uint32_t> draw(std::uint64_t key, std::size_t sequences, std::size_t length) const;

 private:
  struct File {
    std::shared_ptr<const std::byte> memory;  // of the first token
    std::size_t width;                        // bytes of a token
  };
  void add(const std::filesystem::path& path);

  std::vector<File> files_{};
  std::vector<std::size_t> first_{0};  // the number of each file's first token, and of all tokens
};

}  // namespace ballast::llama
