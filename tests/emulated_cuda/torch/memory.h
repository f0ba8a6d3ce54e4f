// Memory of the GPU and pinned memory of the host, for torch's tensors.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace emulated_torch {

c10::Allocator& device_allocator();
c10::Allocator& pinned_allocator();

// The memory is not used again before the work that this stream has now is done.
void record_stream(const c10::DataPtr& memory, const c10::Stream& stream);
void empty_cache();

}  // namespace emulated_torch
