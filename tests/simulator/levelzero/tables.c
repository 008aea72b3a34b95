/* The tables by which the loader finds the driver's calls: every table of versions 1.0 to 1.17 answers, and holds
 * what the simulator has. The rest stays empty, which the loader reports as unsupported. An older loader hands in a
 * shorter table, so an entry is filled only if the version that it asks for has it. */
#include "front.h"

struct entry {
  int at;
  const char *name;
};

static int fill(int version, void **table, const struct entry *entries, size_t n) {
  int known = (int)ds_switch(DS_api_version);
  bool unused;
  if (!table)
    return ZE_NULL_POINTER;
  if (version >> 16 != known >> 16)
    return ZE_UNSUPPORTED_VERSION;
  version = version < known ? version : known;
  for (size_t i = 0; i < n; i++) {
    const struct ds_call *call = ds_resolve(entries[i].name, version, version, &unused);
    if (call)
      table[entries[i].at] = call->function;
  }
  return ZE_OK;
}

#define TABLE(name_, ...)                                                                     \
  DS_EXPORT int name_##ProcAddrTable(int version, void **table);                              \
  int name_##ProcAddrTable(int version, void **table) {                                       \
    static const struct entry entries[] = {__VA_ARGS__};                                      \
    return fill(version, table, entries, sizeof entries / sizeof *entries);                   \
  }
#define EMPTY(name_) TABLE(name_, {0, ""})

TABLE(zeGetGlobal, {0, "zeInit"}, {1, "zeInitDrivers"})
TABLE(zeGetDriver, {0, "zeDriverGet"}, {1, "zeDriverGetApiVersion"}, {2, "zeDriverGetProperties"},
      {3, "zeDriverGetIpcProperties"}, {4, "zeDriverGetExtensionProperties"},
      {5, "zeDriverGetExtensionFunctionAddress"})
TABLE(zeGetDevice, {0, "zeDeviceGet"}, {1, "zeDeviceGetSubDevices"}, {2, "zeDeviceGetProperties"},
      {5, "zeDeviceGetCommandQueueGroupProperties"}, {6, "zeDeviceGetMemoryProperties"}, {12, "zeDeviceCanAccessPeer"},
      {13, "zeDeviceGetStatus"}, {17, "zeDevicePciGetPropertiesExt"}, {18, "zeDeviceGetRootDevice"})
TABLE(zeGetContext, {0, "zeContextCreate"}, {1, "zeContextDestroy"}, {2, "zeContextGetStatus"})
TABLE(zeGetMem, {0, "zeMemAllocShared"}, {1, "zeMemAllocDevice"}, {2, "zeMemAllocHost"}, {3, "zeMemFree"},
      {4, "zeMemGetAllocProperties"}, {5, "zeMemGetAddressRange"}, {6, "zeMemGetIpcHandle"}, {7, "zeMemOpenIpcHandle"},
      {8, "zeMemCloseIpcHandle"}, {10, "zeMemPutIpcHandle"}, {12, "zeMemGetIpcHandleWithProperties"})
TABLE(zeGetMemExp, {0, "zeMemGetIpcHandleFromFileDescriptorExp"}, {1, "zeMemGetFileDescriptorFromIpcHandleExp"})
TABLE(zeGetEventPool, {0, "zeEventPoolCreate"}, {1, "zeEventPoolDestroy"}, {2, "zeEventPoolGetIpcHandle"},
      {3, "zeEventPoolOpenIpcHandle"}, {4, "zeEventPoolCloseIpcHandle"}, {5, "zeEventPoolPutIpcHandle"})
TABLE(zeGetEvent, {0, "zeEventCreate"}, {1, "zeEventDestroy"}, {2, "zeEventHostSignal"}, {3, "zeEventHostSynchronize"},
      {4, "zeEventQueryStatus"}, {5, "zeEventHostReset"})
TABLE(zeGetCommandList, {1, "zeCommandListCreateImmediate"}, {2, "zeCommandListDestroy"},
      {6, "zeCommandListAppendBarrier"}, {8, "zeCommandListAppendMemoryCopy"}, {9, "zeCommandListAppendMemoryFill"},
      {10, "zeCommandListAppendMemoryCopyRegion"}, {18, "zeCommandListAppendSignalEvent"},
      {19, "zeCommandListAppendWaitOnEvents"}, {20, "zeCommandListAppendEventReset"},
      {28, "zeCommandListHostSynchronize"})

EMPTY(zeGetRTASBuilder) EMPTY(zeGetRTASBuilderExp) EMPTY(zeGetRTASParallelOperation)
EMPTY(zeGetRTASParallelOperationExp) EMPTY(zeGetDriverExp) EMPTY(zeGetDeviceExp) EMPTY(zeGetCommandQueue)
EMPTY(zeGetCommandListExp) EMPTY(zeGetImage) EMPTY(zeGetImageExp) EMPTY(zeGetFence) EMPTY(zeGetEventExp)
EMPTY(zeGetModule) EMPTY(zeGetModuleBuildLog) EMPTY(zeGetKernel) EMPTY(zeGetKernelExp) EMPTY(zeGetSampler)
EMPTY(zeGetPhysicalMem) EMPTY(zeGetVirtualMem) EMPTY(zeGetFabricVertexExp) EMPTY(zeGetFabricEdgeExp)
EMPTY(zeGetGraph) EMPTY(zeGetExecutableGraph)

TABLE(zesGetGlobal, {0, "zesInit"})
TABLE(zesGetDriver, {2, "zesDriverGet"})
TABLE(zesGetDevice, {0, "zesDeviceGetProperties"}, {4, "zesDevicePciGetProperties"},
      {16, "zesDeviceEnumMemoryModules"}, {29, "zesDeviceGet"})
TABLE(zesGetMemory, {0, "zesMemoryGetProperties"}, {1, "zesMemoryGetState"})

EMPTY(zesGetDeviceExp) EMPTY(zesGetDriverExp) EMPTY(zesGetOverclock) EMPTY(zesGetScheduler)
EMPTY(zesGetPerformanceFactor) EMPTY(zesGetPower) EMPTY(zesGetFrequency) EMPTY(zesGetEngine) EMPTY(zesGetStandby)
EMPTY(zesGetFirmware) EMPTY(zesGetFirmwareExp) EMPTY(zesGetFabricPort) EMPTY(zesGetTemperature) EMPTY(zesGetPsu)
EMPTY(zesGetFan) EMPTY(zesGetLed) EMPTY(zesGetRas) EMPTY(zesGetRasExp) EMPTY(zesGetDiagnostics)
EMPTY(zesGetVFManagementExp)

EMPTY(zetGetMetricProgrammableExp) EMPTY(zetGetMetricTracerExp) EMPTY(zetGetMetricDecoderExp) EMPTY(zetGetDevice)
EMPTY(zetGetDeviceExp) EMPTY(zetGetContext) EMPTY(zetGetCommandList) EMPTY(zetGetCommandListExp) EMPTY(zetGetModule)
EMPTY(zetGetKernel) EMPTY(zetGetMetric) EMPTY(zetGetMetricExp) EMPTY(zetGetMetricGroup) EMPTY(zetGetMetricGroupExp)
EMPTY(zetGetMetricStreamer) EMPTY(zetGetMetricQueryPool) EMPTY(zetGetMetricQuery) EMPTY(zetGetTracerExp)
EMPTY(zetGetDebug)
