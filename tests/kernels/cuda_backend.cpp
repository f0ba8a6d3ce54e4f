#include "kernels/runtime/buffer.h"
#include "kernels/runtime/stream.h"
#include "tests/kernels/device_backends.h"

namespace ballast::kernels {
namespace {

class CudaUnderTest : public TestBackend {
 public:
  std::string name() const override { return "CUDA"; }
  Backend& kernels() override { return *backend_; }
  // Allocates from one block, and from its start again whenever none of it is in use, because allocating on a GPU takes
  // long.
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    const std::size_t rounded = (bytes + 255) / 256 * 256;
    REQUIRE(used_ + rounded <= block_bytes);
    std::byte* const memory = block_.data() + used_;
    used_ += rounded;
    ++in_use_;
    return {memory, [this](std::byte*) { used_ = --in_use_ == 0 ? 0 : used_; }};
  }
  void write(std::byte* to, const void* from, std::size_t bytes) override { copy(to, from, bytes, stream_); }
  void read(void* to, const std::byte* from, std::size_t bytes) override {
    copy(to, from, bytes, stream_);
    stream_.synchronize();
  }
  std::size_t every(std::size_t n) const override { return is_emulated() ? n : 1; }

 private:
  static constexpr std::size_t block_bytes = std::size_t{512} << 20;
  MemoryAccounts accounts_;
  Stream stream_;
  Buffer block_ = ballast::allocate(accounts_, {.kind = MemoryKind::device, .bytes = block_bytes, .owner = "test"});
  std::size_t used_ = 0;
  int in_use_ = 0;
  std::unique_ptr<Backend> backend_ = cuda_backend(stream_.handle());
};

}  // namespace

bool is_emulated() { return device::list().front().name == "emulated GPU"; }

void on_cuda(const BackendTest& test) {
  CudaUnderTest cuda;
  INFO("on " << cuda.name());
  test(cuda);
}

}  // namespace ballast::kernels
