// The part of CUDA's driver API that Ballast calls, through cudaGetDriverEntryPointByVersion().
#pragma once

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_DEVICE = 101 };
using CUdevice = int;

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active);
