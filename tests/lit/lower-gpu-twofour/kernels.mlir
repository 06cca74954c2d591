// The kernels of a product of a 2:4 weight, and what they do with a panel.
// RUN: gossamer-opt %s -p 'expose-storage,lower-gpu-twofour,canonicalize,cse' --split-input-file --verify-diagnostics | filecheck %s

// Of a panel of 64 columns, a thread copies four parts of x, zeros beyond K, two of the values, and some threads one of the
// metadata. In the loop, two steps of 32 columns multiply 4 x 16 rows by 4 x 8 tokens; a pair of tiles shares a word of metadata.
// CHECK-LABEL: gpu.func @panels_t128(
// CHECK-SAME:    %{{.*}}: memref<?x256xbf16>, %[[WORDS:[a-z0-9]*]]: memref<?xi32>, %[[VALUES:[a-z0-9]*]]: memref<?xbf16>, %{{.*}}: memref<?x130xbf16>)
// CHECK-SAME:    kernel.launch = {blocks = 2 : i64, shared = 76800 : i64, threads = 256 : i64, tokens = 128 : i64}
// CHECK-COUNT-4: nvgpu.device_async_copy {{.*}}, 8, %{{.*}} {bypassL1} : memref<?x256xbf16> to memref<3x128x64xbf16, #gpu.address_space<workgroup>>
// CHECK-COUNT-2: nvgpu.device_async_copy %[[VALUES]]{{.*}}, 8 {bypassL1} : memref<?xbf16> to memref<3x64x64xbf16, #gpu.address_space<workgroup>>
// CHECK:         scf.if
// CHECK:           nvgpu.device_async_copy %[[WORDS]]{{.*}}, 4 {bypassL1} : memref<?xi32> to memref<3x256xi32, #gpu.address_space<workgroup>>
// CHECK:         nvvm.cp.async.commit.group
// CHECK:         scf.for
// CHECK-NEXT:      nvvm.cp.async.wait.group 1
// CHECK-NEXT:      gpu.barrier
// CHECK:           nvvm.cp.async.commit.group
// CHECK-COUNT-5:   nvgpu.ldmatrix
// CHECK:           %[[PAIR:.*]] = memref.load %{{.*}} : memref<3x256xi32, #gpu.address_space<workgroup>>
// CHECK-COUNT-4:   nvvm.mma.sp.sync {{.*}} sparseMetadata[%[[PAIR]]] selector[%c0_i32{{.*}}] {{.*}}orderedMetadata
// CHECK:           nvgpu.ldmatrix
// CHECK-COUNT-4:   nvvm.mma.sp.sync {{.*}} sparseMetadata[%[[PAIR]]] selector[%c1_i32{{.*}}] {{.*}}orderedMetadata
// CHECK:         vector.store {{.*}} : memref<?x130xbf16>, vector<2xbf16>
// CHECK-LABEL: gpu.func @panels_t32(
// CHECK-SAME:    kernel.launch = {blocks = 2 : i64, shared = 39936 : i64, threads = 64 : i64, tokens = 32 : i64}
func.func @panels(%x: tensor<?x256xbf16>, %w: tensor<130x256xbf16, "twofour(reduction=1)">) -> tensor<?x130xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-twofour", tile = [128, 128, 64]} : (tensor<?x256xbf16>, tensor<130x256xbf16, "twofour(reduction=1)">) -> tensor<?x130xbf16>
  return %y : tensor<?x130xbf16>
}

// -----

// expected-error@unknown {{tile [64, 128, 64] is not [128, 128, 64]}}
func.func @tile(%x: tensor<?x256xbf16>, %w: tensor<130x256xbf16, "twofour(reduction=1)">) -> tensor<?x130xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-twofour", tile = [64, 128, 64]} : (tensor<?x256xbf16>, tensor<130x256xbf16, "twofour(reduction=1)">) -> tensor<?x130xbf16>
  return %y : tensor<?x130xbf16>
}
