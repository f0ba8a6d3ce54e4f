// Places of one size in a nameless file, which the kernel removes with the process. A place is used again after its
// last write has ended.
#pragma once

#include <deque>

#include "offload/completion.h"
#include "offload/file.h"

namespace ballast::offload {

// Used by one thread at a time.
class ScratchPlaces {
 public:
  ScratchPlaces(const std::filesystem::path& directory, std::size_t place_bytes)
      : directory_(directory), place_bytes_(place_bytes), file_(File::nameless(directory)) {}

  const File& file() const { return file_; }
  std::uint64_t bytes() const { return count_ * place_bytes_; }

  // Returns the offset of a free place. Throws B2202 if the file would exceed the limit of this process.
  std::uint64_t take();

  void give_back(std::uint64_t offset, Completion last_write) { free_.push_back({offset, std::move(last_write)}); }

 private:
  struct Free {
    std::uint64_t offset;
    Completion last_write;
  };

  std::filesystem::path directory_;
  std::uint64_t place_bytes_;
  File file_;
  std::uint64_t count_ = 0;
  std::deque<Free> free_;
};

}  // namespace ballast::offload
