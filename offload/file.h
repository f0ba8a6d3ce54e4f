// An open file on a drive, and the requirements of its file system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace ballast::offload {

inline constexpr std::size_t block_bytes = 4096;  // the unit of direct I/O that works on all known drives

struct FileOptions {
  bool create = false;         // a new file, readable by its user only; an existing one is an error
  bool direct = true;          // bypass the page cache if the file system supports it
  bool allow_network = false;  // network file systems are slow, and a lost server blocks the process
  bool writable = true;
};

// Owns the descriptor. It does no I/O on the content: an IoQueue does.
class File {
 public:
  explicit File(const std::filesystem::path& path, const FileOptions& options = {});

  // Creates a file without a name. The kernel removes it when the last process that has it open ends, in any way.
  static File nameless(const std::filesystem::path& directory, const FileOptions& options = {});

  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  std::uint64_t bytes() const;  // current size
  void rename(const std::filesystem::path& to);

  // Direct I/O moves whole blocks, to and from memory that is aligned to block_bytes.
  bool direct() const { return buffered_because_.empty(); }
  const std::string& buffered_because() const { return buffered_because_; }

 private:
  File(std::filesystem::path path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

  std::filesystem::path path_;
  int descriptor_ = -1;
  std::string buffered_because_ = "it is requested";
};

// Makes new and removed names in the directory durable.
void flush_directory(const std::filesystem::path& directory);

// Throws B3201, or B2202 where the drive is full; `error` is an errno. Names the owner of a directory of another user that is
// the reason.
[[noreturn]] void fail_file(std::string_view operation, const std::filesystem::path& path, std::uint64_t offset,
                            int error);

}  // namespace ballast::offload
