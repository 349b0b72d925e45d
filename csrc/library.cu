// Facts of the library: its interface version, the texts of errors, the version of the driver.
#include <cuda_runtime.h>

#include "spec/device_abi.hpp"

int spec_abi_version() { return SPEC_ABI_VERSION; }

const char* spec_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

int spec_driver_version(int* version) { return cudaDriverGetVersion(version); }
