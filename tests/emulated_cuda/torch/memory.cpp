#include "tests/emulated_cuda/torch/memory.h"

#include <sys/mman.h>

#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "tests/emulated_cuda/pinned_memory.h"
#include "tests/emulated_cuda/torch/device.h"

namespace emulated_torch {
namespace {

constexpr int freed = 0xff;  // what freed memory is filled with: a NaN in all formats

struct Block {
  int gpu = 0;
  cudaStream_t stream = nullptr;  // the stream that it was allocated in
  std::size_t bytes = 0;
  std::set<cudaStream_t> used_in{};  // besides
};

// Work of `stream` that follows comes after the work that `other` has now.
void wait_for(cudaStream_t stream, cudaStream_t other) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  check(cudaEventRecord(event, other), "cudaEventRecord");
  check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
  check(cudaEventDestroy(event), "cudaEventDestroy");
}

// Caches memory as torch's allocator for CUDA does: freed memory belongs to the stream that it was allocated in, and the next
// tensor of that stream takes it at once. It is overwritten first, in that stream: a reader in another stream that nothing
// ordered finds NaNs.
class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const int gpu = current_gpu();
    const c10::Device device(device_type, static_cast<c10::DeviceIndex>(gpu));
    if (bytes == 0) return {nullptr, device};
    const std::lock_guard lock(mutex_);
    void* memory = take({gpu, current_stream(gpu), bytes});
    if (memory == nullptr) memory = make(bytes);
    used_[memory] = {.gpu = gpu, .stream = current_stream(gpu), .bytes = bytes};
    return {memory, memory, &DeviceAllocator::release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &DeviceAllocator::release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    const int gpu = current_gpu();
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, current_stream(gpu)), "cudaMemcpyAsync");
  }

  void record(void* memory, cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    if (const auto found = used_.find(memory); found != used_.end()) found->second.used_in.insert(stream);
  }

  void empty() {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, memory] : free_) {
      const OnGpu on(std::get<int>(key));
      check(cudaFree(memory), "cudaFree");
    }
    free_.clear();
  }

 private:
  using Key = std::tuple<int, cudaStream_t, std::size_t>;

  static void release(void* memory);

  void* take(const Key& key) {
    const auto found = free_.find(key);
    if (found == free_.end()) return nullptr;
    void* const memory = found->second;
    free_.erase(found);
    return memory;
  }

  static void* make(std::size_t bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
  }

  void give_back(void* memory) {
    const std::lock_guard lock(mutex_);
    const Block block = used_.at(memory);
    used_.erase(memory);
    const OnGpu on(block.gpu);
    for (const cudaStream_t other : block.used_in) {
      wait_for(block.stream, other);
    }
    check(cudaMemsetAsync(memory, freed, block.bytes, block.stream), "cudaMemsetAsync");
    free_.emplace(Key{block.gpu, block.stream, block.bytes}, memory);
  }

  std::mutex mutex_;  // guards the members below
  std::map<void*, Block> used_;
  std::multimap<Key, void*> free_;
};

// Never destroyed: tensors may live until the process ends.
DeviceAllocator& the_device_allocator() {
  static auto* const allocator = new DeviceAllocator;
  return *allocator;
}

// Called by destructors. An error of CUDA leaves the memory allocated.
void DeviceAllocator::release(void* memory) {
  try {
    the_device_allocator().give_back(memory);
  } catch (const c10::Error& error) {
    TORCH_WARN("cannot free memory: ", error.what());
  }
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    free_parked();
    void* const memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "cannot pin memory: mmap failed");
    check(cudaHostRegister(memory, bytes, cudaHostRegisterPortable), "cudaHostRegister");
    {
      const std::lock_guard lock(mutex_);
      bytes_[memory] = bytes;
    }
    return {memory, memory, &PinnedAllocator::release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* memory);

  // Frees what no copy uses any more, as torch does when it allocates.
  void free_parked() {
    const std::lock_guard lock(mutex_);
    std::erase_if(parked_, [this](void* memory) {
      if (emulated::is_being_copied(memory)) return false;
      check(cudaHostUnregister(memory), "cudaHostUnregister");
      ::munmap(memory, bytes_.at(memory));
      bytes_.erase(memory);
      return true;
    });
  }

  void park(void* memory) {
    const std::lock_guard lock(mutex_);
    parked_.push_back(memory);
  }

  std::mutex mutex_;  // guards the members below
  std::map<void*, std::size_t> bytes_;
  std::vector<void*> parked_;  // freed, and perhaps being copied
};

PinnedAllocator& the_pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return *allocator;
}

void PinnedAllocator::release(void* memory) { the_pinned_allocator().park(memory); }

const bool is_torchs_allocator = [] {
  c10::SetAllocator(device_type, &the_device_allocator());
  return true;
}();

}  // namespace

c10::Allocator& device_allocator() { return the_device_allocator(); }
c10::Allocator& pinned_allocator() { return the_pinned_allocator(); }

void record_stream(const c10::DataPtr& memory, const c10::Stream& stream) {
  the_device_allocator().record(memory.get(), handle_of(stream));
}

void empty_cache() { the_device_allocator().empty(); }

}  // namespace emulated_torch
