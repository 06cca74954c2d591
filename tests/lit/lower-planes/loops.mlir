// A single token: the bytes of x are looked up in registers, those of 64 rows at a time.
// RUN: gossamer-opt %s -p 'expose-storage,lower-planes,canonicalize,cse' --split-input-file | filecheck %s

// K = 70 is two blocks of 64, and a block of zeros comes after them; a plane for each byte of a float.
// CHECK:       module attributes {kernel.workspace = 768 : index}
// CHECK-LABEL: func.func private @region_rows1(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x70xf32>, %[[BOUNDS:[a-z0-9]*]]: memref<?xi32>, %[[ORIGINS:[a-z0-9]*]]: memref<?xi32>, %[[PLACES:[a-z0-9]*]]: memref<?xi8>, %[[VAL:[a-z0-9]*]]: memref<?xf32>, %[[BIAS:[a-z0-9]*]]: memref<7xf32>, %[[OUT:[a-z0-9]*]]: memref<?x7xf32>,
// CHECK:         %[[PLANES:.*]] = memref.view %{{.*}} : memref<?xi8> to memref<4x192xi8>
// CHECK-COUNT-4: vector.maskedload %[[X]]
// CHECK:         vector.shuffle %{{.*}} [0, 4, 8,
// CHECK:         vector.store %{{.*}}, %[[PLANES]][%c0, %{{.*}}] : memref<4x192xi8>, vector<64xi8>
// CHECK:         vector.store %{{.*}}, %[[PLANES]][%c3, %c128]

// The window's two blocks of each plane are loaded once for a run; then four look-ups and four multiply-adds a step.
// CHECK:         scf.for %[[AN:[a-z0-9]*]] = %{{.*}} iter_args(%[[AT:[a-z0-9]*]] = %{{.*}}) -> (index, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>) {
// CHECK:           memref.load %[[ORIGINS]][%[[AN]]]
// CHECK-COUNT-8:   vector.load %[[PLANES]]
// CHECK:           %[[P:.*]] = vector.load %[[PLACES]][%[[AT]]]
// CHECK:           %[[USED:.*]] = arith.cmpi slt, %[[P]]
// CHECK:           %[[FOUND:.*]] = llvm.call_intrinsic "llvm.x86.avx512.vpermi2var.qi.512"(%{{.*}}, %[[P]], %{{.*}})
// CHECK:           arith.select %[[USED]], %[[FOUND]]
// CHECK-COUNT-3:   llvm.call_intrinsic
// CHECK:           vector.shuffle %{{.*}} [0, 64, 1, 65, 2, 66, 3, 67, 4, 68, 5, 69, 6, 70, 7, 71, 16,
// CHECK:           vector.shuffle %{{.*}} [0, 32, 1, 33, 2, 34, 3, 35, 8,
// CHECK:           vector.load %[[VAL]][%[[AT]]]
// CHECK-COUNT-12:  vector.fma
// CHECK:           scf.yield
// CHECK:         scf.for
// CHECK-COUNT-8:   vector.fma
// CHECK:           scf.yield

// The sums are those of 64 rows already.
// CHECK-COUNT-4: vector.maskedstore %[[OUT]]
// CHECK-LABEL: func.func @region(
// CHECK:         call @region_rows1
func.func @region(%x: tensor<?x70xf32>, %w: tensor<7x70xf32, "windows(reduction=1, lanes=64)">, %bias: tensor<7xf32>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<7xf32>) -> f32
    %0 = arith.addf %sum, %b : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "planes", tile = [1]} : (tensor<?x70xf32>, tensor<7x70xf32, "windows(reduction=1, lanes=64)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}

// -----

// The lower half of a bf16 as f32 is 0: two planes are enough.
// CHECK-LABEL: func.func private @narrow_rows1(
// CHECK:         scf.for
// CHECK:         scf.for {{.*}} -> (index, vector<16xf32>
// CHECK-COUNT-6:   llvm.call_intrinsic
// CHECK-NOT:       llvm.call_intrinsic
// CHECK:           scf.yield
func.func @narrow(%x: tensor<?x70xbf16>, %w: tensor<7x70xbf16, "windows(reduction=1, lanes=64)">) -> tensor<?x7xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "planes", tile = [1]} : (tensor<?x70xbf16>, tensor<7x70xbf16, "windows(reduction=1, lanes=64)">) -> tensor<?x7xbf16>
  return %y : tensor<?x7xbf16>
}
